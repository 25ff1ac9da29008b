//! The GPT of the example `char_gpt` in plain candle, for inference.
use candle_core::{D, Device, Module, Result, Tensor};
use candle_nn::ops::softmax_last_dim;
use candle_nn::{Embedding, LayerNorm, Linear, VarBuilder, layer_norm, linear};

/// The sizes of a GPT.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Config {
    /// The number of different characters.
    pub(crate) vocabulary: usize,
    /// The number of characters that it sees at most.
    pub(crate) context: usize,
    pub(crate) width: usize,
    pub(crate) heads: usize,
    pub(crate) layers: usize,
}

pub(crate) struct Gpt {
    config: Config,
    tokens: Embedding,
    positions: Tensor,
    blocks: Vec<Block>,
    norm: LayerNorm,
    /// The embedding again: the weights are tied.
    head: Linear,
}

impl Gpt {
    pub(crate) fn new(config: Config, vb: VarBuilder) -> Result<Self> {
        let Config { vocabulary, context, width, heads, layers } = config;
        let tokens = vb.get((vocabulary, width), "tokens.weight")?;
        let block = |layer| Block::new(width, heads, vb.pp(format!("blocks.{layer}")));
        Ok(Self {
            config,
            tokens: Embedding::new(tokens.clone(), width),
            positions: vb.get((context, width), "positions")?,
            blocks: (0..layers).map(block).collect::<Result<_>>()?,
            norm: layer_norm(width, 1e-5, vb.pp("norm"))?,
            head: Linear::new(tokens, None),
        })
    }

    pub(crate) fn config(&self) -> &Config {
        &self.config
    }
}

impl Module for Gpt {
    /// From characters u32[B, T] to logits f32[B, T, vocabulary].
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.tokens.forward(x)?.broadcast_add(&self.positions.narrow(0, 0, x.dim(1)?)?)?;
        let x = self.blocks.iter().try_fold(x, |x, block| block.forward(&x))?;
        self.head.forward(&self.norm.forward(&x)?)
    }
}

struct Block {
    heads: usize,
    norm1: LayerNorm,
    qkv: Linear,
    projection: Linear,
    norm2: LayerNorm,
    fc1: Linear,
    fc2: Linear,
}

impl Block {
    fn new(width: usize, heads: usize, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            heads,
            norm1: layer_norm(width, 1e-5, vb.pp("norm1"))?,
            qkv: linear(width, 3 * width, vb.pp("qkv"))?,
            projection: linear(width, width, vb.pp("projection"))?,
            norm2: layer_norm(width, 1e-5, vb.pp("norm2"))?,
            fc1: linear(width, 4 * width, vb.pp("fc1"))?,
            fc2: linear(4 * width, width, vb.pp("fc2"))?,
        })
    }

    fn attention(&self, x: &Tensor) -> Result<Tensor> {
        let (samples, tokens, width) = x.dims3()?;
        let size = width / self.heads;
        let qkv = self.qkv.forward(x)?.reshape((samples, tokens, 3, self.heads, size))?.permute((2, 0, 3, 1, 4))?;
        let [q, k, v] = [qkv.get(0)?.contiguous()?, qkv.get(1)?.contiguous()?, qkv.get(2)?.contiguous()?];
        let weights = (q.matmul(&k.t()?)? / (size as f64).sqrt())?.broadcast_add(&mask(tokens, x.device())?)?;
        let y = softmax_last_dim(&weights)?.matmul(&v)?;
        self.projection.forward(&y.transpose(1, 2)?.reshape((samples, tokens, width))?)
    }
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = (x + self.attention(&self.norm1.forward(x)?)?)?;
        &x + self.fc2.forward(&self.fc1.forward(&self.norm2.forward(&x)?)?.gelu()?)?
    }
}

/// Adds nothing to what lies before a character, and −∞ to what comes after it.
fn mask(tokens: usize, device: &Device) -> Result<Tensor> {
    let row = |row| (0..tokens).map(move |column| if column > row { f32::NEG_INFINITY } else { 0. });
    Tensor::from_iter((0..tokens).flat_map(row), device)?.reshape((tokens, tokens))
}

/// Returns the logits f32[vocabulary] of the character that follows `text`.
pub(crate) fn next_logits(gpt: &Gpt, text: &[u32], device: &Device) -> Result<Tensor> {
    let seen = &text[text.len().saturating_sub(gpt.config().context)..];
    let logits = gpt.forward(&Tensor::new(seen, device)?.unsqueeze(0)?)?;
    logits.narrow(D::Minus2, seen.len() - 1, 1)?.flatten_all()
}
