//! A GPT with learned positions, or a Llama. Their heads have the embedding's weight.
use crate::data::TokenBatch;
use crate::{gpt, llama};
use candle_core::{DType, Module, Result, Tensor};
use candle_ddp::data::Packed;
use candle_ddp::nn::{Embedding, LayerNorm, Linear, RmsNorm, add, layer_norm, linear_cross_entropy, narrow, rms_norm};
use candle_ddp::{Error, block};
use candle_nn::{Init, VarBuilder};
use clap::{Args, ValueEnum};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Architecture {
    Gpt,
    Llama,
}

/// The sizes of a model.
#[derive(Args, Clone, Copy, Debug)]
pub struct Config {
    #[arg(long, value_enum, default_value = "gpt")]
    pub model: Architecture,
    /// The number of different tokens.
    #[arg(long, default_value_t = 50257)]
    pub vocabulary: usize,
    /// The number of tokens that the model sees.
    #[arg(long, default_value_t = 1024)]
    pub context: usize,
    /// The length of the vectors within the model, a multiple of --heads.
    #[arg(long, default_value_t = 768)]
    pub width: usize,
    #[arg(long, default_value_t = 12)]
    pub layers: usize,
    #[arg(long, default_value_t = 12)]
    pub heads: usize,
    /// The number of heads of keys and values of a Llama, a divisor of --heads. [default: --heads]
    #[arg(long)]
    pub key_heads: Option<usize>,
}

impl Config {
    pub(crate) fn check(&self) -> candle_ddp::Result<()> {
        let Self { model, vocabulary, context, width, heads, .. } = *self;
        let key_heads = self.key_heads.unwrap_or(heads);
        if vocabulary == 0 || context == 0 {
            return Err(Error::invalid("--context", "it and --vocabulary must be at least 1"));
        }
        if heads == 0 || key_heads == 0 || !width.is_multiple_of(heads) || !heads.is_multiple_of(key_heads) {
            let reason = format!(
                "--width must be a multiple of it, and it of --key-heads, not {width}, {heads} and {key_heads}"
            );
            return Err(Error::invalid("--heads", reason));
        }
        if model == Architecture::Llama && !(width / heads).is_multiple_of(2) {
            let reason = format!("a head of a Llama must have an even size, not {}", width / heads);
            return Err(Error::invalid("--heads", reason));
        }
        Ok(())
    }
}

enum Block {
    Gpt(gpt::Block),
    Llama(llama::Layer),
}

enum Norm {
    Layer(LayerNorm),
    Rms(RmsNorm),
}

enum Positions {
    Learned(Embedding),
    /// Cosines and sines of the angles, f32\[context, pairs\] each.
    Rotations([Tensor; 2]),
}

pub struct Model {
    tokens: Embedding,
    positions: Positions,
    blocks: Vec<candle_ddp::Block<Block>>,
    norm: Norm,
    head: Linear,
}

/// The name of the embedding, which is the head's weight too: it is not Muon's.
pub(crate) fn is_embedding(name: &str) -> bool {
    name.contains("tokens.weight") || name == "positions"
}

/// The name of a bias or of a norm's weight, which does not decay.
pub(crate) fn is_bare(name: &str) -> bool {
    name.ends_with(".bias") || name.contains("norm")
}

impl Model {
    pub fn new(config: Config, vb: VarBuilder) -> Result<Self> {
        let Config { vocabulary, context, width, heads, layers, .. } = config;
        let key_heads = config.key_heads.unwrap_or(heads);
        let init = Init::Randn { mean: 0., stdev: 0.02 };
        let is_gpt = config.model == Architecture::Gpt;
        let vb = if is_gpt { vb } else { vb.pp("model") };
        let tokens = if is_gpt { "tokens.weight" } else { "embed_tokens.weight" };
        let tokens = vb.get_with_hints((vocabulary, width), tokens, init)?;
        let positions = match is_gpt {
            true => Positions::Learned(Embedding::new(vb.get_with_hints((context, width), "positions", init)?, width)),
            false => Positions::Rotations(llama::rotations(context, width / heads / 2, 1e4, DType::F32, vb.device())?),
        };
        // Llama's two thirds of the usual factor of 4, as a multiple of 32.
        let intermediate = (width * 8 / 3).next_multiple_of(32);
        let sizes = llama::Sizes { width, intermediate, heads, key_heads, has_bias: false, eps: 1e-5 };
        let block = |layer: usize| match is_gpt {
            true => block(vb.pp("blocks").pp(layer), |vb| gpt::Block::new(width, heads, vb).map(Block::Gpt)),
            false => block(vb.pp("layers").pp(layer), |vb| llama::Layer::new(sizes, vb).map(Block::Llama)),
        };
        Ok(Self {
            tokens: Embedding::new(tokens.clone(), width),
            positions,
            blocks: (0..layers).map(block).collect::<Result<_>>()?,
            norm: match is_gpt {
                true => Norm::Layer(layer_norm(width, 1e-5, vb.pp("norm"))?),
                false => Norm::Rms(rms_norm(width, 1e-5, vb.pp("norm"))?),
            },
            head: Linear::new(tokens, None),
        })
    }

    /// The head's input, for tokens u32\[B, T\].
    fn features(&self, tokens: &Tensor, row: Option<&Packed>) -> Result<Tensor> {
        let mut x = self.tokens.forward(tokens)?;
        let count = tokens.dim(1)?;
        let mut rotations = None;
        match (&self.positions, row) {
            (Positions::Learned(table), Some(row)) => x = add(&x, &table.forward(&row.positions)?)?,
            (Positions::Learned(table), None) => x = add(&x, &narrow(table.embeddings(), 0, 0, count)?)?,
            // Positions begin anew with each document.
            (Positions::Rotations([cos, sin]), Some(row)) => {
                rotations = Some([cos.index_select(&row.positions, 0)?, sin.index_select(&row.positions, 0)?]);
            }
            (Positions::Rotations(tables), None) => rotations = Some(tables.clone()),
        }
        for block in &self.blocks {
            let (rotations, cu_seq) = (rotations.clone(), row.map(|row| row.cu_seq.clone()));
            x = block.call(&[&x], move |block, x| match (block, &rotations) {
                (Block::Gpt(block), _) => block.forward_documents(&x[0], cu_seq.as_ref()),
                (Block::Llama(block), Some(rotations)) => block.forward(&x[0], rotations, cu_seq.as_ref()),
                (Block::Llama(_), None) => candle_core::bail!("a Llama must have rotations"),
            })?;
        }
        match &self.norm {
            Norm::Layer(norm) => norm.forward(&x),
            Norm::Rms(norm) => norm.forward(&x),
        }
    }

    /// The mean loss of the next tokens, over the [`count`](TokenBatch::count) tokens that have one.
    pub fn loss(&self, batch: &TokenBatch) -> Result<Tensor> {
        let (tokens, next, row) = match batch {
            TokenBatch::Windows(tokens, next) => (tokens, next, None),
            TokenBatch::Row(row) => (&row.tokens, &row.targets, Some(row)),
        };
        linear_cross_entropy(&self.features(tokens, row)?, self.head.weight(), None, next)
    }

    /// The logits f32\[vocabulary\] of the token that follows the last of u32\[1, T\].
    pub fn next(&self, tokens: &Tensor) -> Result<Tensor> {
        let last = self.features(tokens, None)?.narrow(1, tokens.dim(1)? - 1, 1)?;
        self.head.forward(&last)?.flatten_all()?.to_dtype(DType::F32)
    }
}
