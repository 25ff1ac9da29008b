//! The architecture of Qwen2, with the names of its checkpoints. It does not know of adapters.
use crate::llama_layer::{Layer, Sizes, rotations};
use candle_core::{Module, Result, Tensor};
use candle_ddp::data::Packed;
use candle_ddp::metrics::TransformerFlops;
use candle_ddp::nn::{
    Embedding, LinearCrossEntropyOptions, RmsNorm, checkpoint, embedding, linear_cross_entropy_with, rms_norm,
};
use candle_ddp::{Block, block};
use candle_nn::VarBuilder;
use std::sync::Arc;

#[derive(Clone, Copy)]
pub(crate) struct Config {
    pub(crate) vocabulary: usize,
    pub(crate) width: usize,
    pub(crate) intermediate: usize,
    pub(crate) layers: usize,
    pub(crate) heads: usize,
    pub(crate) key_heads: usize,
    pub(crate) context: usize,
}

impl Config {
    pub(crate) fn layer(self) -> Sizes {
        let Self { width, intermediate, heads, key_heads, .. } = self;
        Sizes { width, intermediate, heads, key_heads, has_bias: true, eps: 1e-6 }
    }

    /// The operations of training per token, with so many parameters in adapters. All weights are frozen, the head's too. Computing
    /// layers again does not count.
    pub(crate) fn flops(self, adapters: usize) -> f64 {
        let Self { vocabulary, width, intermediate, layers, heads, key_heads, context } = self;
        let head_dim = width / heads;
        let attention = 2 * width * width + 2 * width * head_dim * key_heads;
        let frozen_parameters = layers * (attention + 3 * width * intermediate) + vocabulary * width;
        TransformerFlops { parameters: adapters, frozen_parameters, layers, heads, head_dim, context }.per_token()
    }
}

pub(crate) struct Qwen2 {
    embed: Embedding,
    layers: Vec<Arc<Block<Layer>>>,
    norm: RmsNorm,
    rotations: [Tensor; 2],
    is_sharded: bool,
}

impl Qwen2 {
    pub(crate) fn new(config: Config, is_sharded: bool, vb: VarBuilder) -> Result<Self> {
        let Config { width, heads, context, .. } = config;
        let rotations = rotations(context, width / heads / 2, 1e6, vb.dtype(), vb.device())?;
        let vb = vb.pp("model");
        let layer = |index| block(vb.pp("layers").pp(index), |vb| Layer::new(config.layer(), vb)).map(Arc::new);
        Ok(Self {
            embed: embedding(config.vocabulary, config.width, vb.pp("embed_tokens"))?,
            layers: (0..config.layers).map(layer).collect::<Result<_>>()?,
            norm: rms_norm(config.width, 1e-6, vb.pp("norm"))?,
            rotations,
            is_sharded,
        })
    }

    /// The mean loss of the next tokens, of documents that share a row if there is one. The backward pass computes each layer again. The
    /// head has the weight of the embedding.
    pub(crate) fn loss(&self, tokens: &Tensor, next: &Tensor, row: Option<&Packed>) -> Result<Tensor> {
        let mut x = self.embed.forward(tokens)?;
        let mut rotations = self.rotations.clone();
        if let Some(Packed { positions, .. }) = row {
            // Positions begin anew with each document.
            for table in &mut rotations {
                *table = table.index_select(positions, 0)?;
            }
        }
        for layer in &self.layers {
            let (layer, rotations) = (Arc::clone(layer), rotations.clone());
            let cu_seq = row.map(|row| row.cu_seq.clone());
            let forward = move |layer: &Layer, x: &[Tensor]| layer.forward(&x[0], &rotations, cu_seq.as_ref());
            x = match self.is_sharded {
                // This is a checkpoint as well.
                true => layer.call(&[&x], forward)?,
                false => checkpoint(&[&x], move |x| layer.call(&[&x[0]], forward.clone()))?,
            };
        }
        let options = LinearCrossEntropyOptions { batch_chunk_size: Some(128), ..Default::default() };
        linear_cross_entropy_with(&self.norm.forward(&x)?, self.embed.embeddings(), None, next, options)
    }
}
