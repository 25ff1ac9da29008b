//! A small GPT: learned positions, pre-norm blocks, no dropout, and a head that shares the embedding's weights.
use super::block::Block;
use super::plain::Config;
use candle_core::{Module, Result, Tensor};
use candle_ddp::nn::{Embedding, LayerNorm, Linear, add, layer_norm, linear_cross_entropy, narrow};
use candle_nn::{Init, VarBuilder};

pub(crate) struct Gpt {
    tokens: Embedding,
    positions: Tensor,
    blocks: Vec<candle_ddp::Block<Block>>,
    norm: LayerNorm,
    head: Linear,
}

impl Gpt {
    pub(crate) fn new(config: Config, vb: VarBuilder) -> Result<Self> {
        let Config { vocabulary, context, width, heads, layers } = config;
        let init = Init::Randn { mean: 0., stdev: 0.02 };
        let tokens = vb.get_with_hints((vocabulary, width), "tokens.weight", init)?;
        let block = |layer| candle_ddp::block(vb.pp(format!("blocks.{layer}")), |vb| Block::new(width, heads, vb));
        Ok(Self {
            tokens: Embedding::new(tokens.clone(), width),
            positions: vb.get_with_hints((context, width), "positions", init)?,
            blocks: (0..layers).map(block).collect::<Result<_>>()?,
            norm: layer_norm(width, 1e-5, vb.pp("norm"))?,
            head: Linear::new(tokens, None),
        })
    }

    /// What the head gets.
    fn features(&self, x: &Tensor) -> Result<Tensor> {
        let x = add(&self.tokens.forward(x)?, &narrow(&self.positions, 0, 0, x.dim(1)?)?)?;
        let x = self.blocks.iter().try_fold(x, |x, block| block.forward(&x))?;
        self.norm.forward(&x)
    }

    /// The cross entropy of characters u32[B, T] and those that follow each of them, without logits that take memory.
    pub(crate) fn loss(&self, x: &Tensor, next: &Tensor) -> Result<Tensor> {
        linear_cross_entropy(&self.features(x)?, self.head.weight(), None, next)
    }
}

impl Module for Gpt {
    /// From characters u32[B, T] to logits [B, T, vocabulary].
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.head.forward(&self.features(x)?)
    }
}
