//! The architecture of Qwen2, with the names of its checkpoints. It does not know of adapters.
use candle_core::{DType, Device, Module, Result, Tensor};
use candle_ddp::data::Packed;
use candle_ddp::metrics::TransformerFlops;
use candle_ddp::nn::{
    AttentionOptions, Embedding, Linear, RmsNorm, add, checkpoint, embedding, linear, linear_cross_entropy_with,
    linear_no_bias, rms_norm, rope, scaled_dot_product_attention, silu,
};
use candle_ddp::nn::{LinearCrossEntropyOptions, reshape, transpose};
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

/// A block of attention and a gated network.
pub(crate) struct Layer {
    config: Config,
    projections: [Linear; 4],
    gate: Linear,
    up: Linear,
    down: Linear,
    norms: [RmsNorm; 2],
}

impl Layer {
    pub(crate) fn new(config: Config, vb: VarBuilder) -> Result<Self> {
        let Config { width, intermediate, heads, key_heads, .. } = config;
        let (of_keys, attention, mlp) = (width / heads * key_heads, vb.pp("self_attn"), vb.pp("mlp"));
        Ok(Self {
            config,
            projections: [
                linear(width, width, attention.pp("q_proj"))?,
                linear(width, of_keys, attention.pp("k_proj"))?,
                linear(width, of_keys, attention.pp("v_proj"))?,
                linear_no_bias(width, width, attention.pp("o_proj"))?,
            ],
            gate: linear_no_bias(width, intermediate, mlp.pp("gate_proj"))?,
            up: linear_no_bias(width, intermediate, mlp.pp("up_proj"))?,
            down: linear_no_bias(intermediate, width, mlp.pp("down_proj"))?,
            norms: [
                rms_norm(width, 1e-6, vb.pp("input_layernorm"))?,
                rms_norm(width, 1e-6, vb.pp("post_attention_layernorm"))?,
            ],
        })
    }

    fn forward(&self, x: &Tensor, [cos, sin]: &[Tensor; 2], cu_seq: Option<Tensor>) -> Result<Tensor> {
        let (samples, tokens, width) = x.dims3()?;
        let Config { heads, key_heads, .. } = self.config;
        let normed = self.norms[0].forward(x)?;
        let split = |projection: &Linear, heads: usize| {
            transpose(&reshape(&projection.forward(&normed)?, (samples, tokens, heads, ()))?, 1, 2)
        };
        let [query, key, value, output] = &self.projections;
        let query = rope(&split(query, heads)?.contiguous()?, cos, sin)?;
        let key = rope(&split(key, key_heads)?.contiguous()?, cos, sin)?;
        let options = AttentionOptions { is_causal: true, cu_seq, ..Default::default() };
        let y = scaled_dot_product_attention(&query, &key, &split(value, key_heads)?, options)?;
        let y = output.forward(&reshape(&transpose(&y, 1, 2)?, (samples, tokens, width))?)?;
        let (x, normed) = self.norms[1].add_norm(x, &y)?;
        let gated = (silu(&self.gate.forward(&normed)?)? * self.up.forward(&normed)?)?;
        add(&x, &self.down.forward(&gated)?)
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
        let (rotations, vb) = (rotations(config, vb.dtype(), vb.device())?, vb.pp("model"));
        let layer = |index| block(vb.pp("layers").pp(index), |vb| Layer::new(config, vb)).map(Arc::new);
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
            let forward = move |layer: &Layer, x: &[Tensor]| layer.forward(&x[0], &rotations, cu_seq.clone());
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

/// The cosines and sines of the angles of each position.
fn rotations(config: Config, dtype: DType, device: &Device) -> Result<[Tensor; 2]> {
    let pairs = config.width / config.heads / 2;
    let angle = |position: usize, pair: usize| position as f64 / 1e6f64.powf(pair as f64 / pairs as f64);
    let angles: Vec<f64> = (0..config.context * pairs).map(|index| angle(index / pairs, index % pairs)).collect();
    let angles = Tensor::from_vec(angles, (config.context, pairs), device)?;
    Ok([angles.cos()?.to_dtype(dtype)?, angles.sin()?.to_dtype(dtype)?])
}
