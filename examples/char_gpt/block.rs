//! A block of a GPT: attention and a network of two layers, each after a norm and with a residual connection.
use candle_core::{Module, Result, Tensor};
use candle_ddp::nn::{
    AttentionOptions, LayerNorm, Linear, add, gelu, layer_norm, linear, scaled_dot_product_attention_qkvpacked,
};
use candle_nn::VarBuilder;

pub(crate) struct Block {
    heads: usize,
    norm1: LayerNorm,
    qkv: Linear,
    projection: Linear,
    norm2: LayerNorm,
    fc1: Linear,
    fc2: Linear,
}

impl Block {
    pub(crate) fn new(width: usize, heads: usize, vb: VarBuilder) -> Result<Self> {
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

    fn attention(&self, x: &Tensor, cu_seq: Option<&Tensor>) -> Result<Tensor> {
        let options = AttentionOptions { is_causal: true, cu_seq: cu_seq.cloned(), ..Default::default() };
        let y = scaled_dot_product_attention_qkvpacked(&self.qkv.forward(x)?, self.heads, options)?;
        self.projection.forward(&y)
    }

    /// With documents that share rows, if `cu_seq` says where they begin.
    pub(crate) fn forward_documents(&self, x: &Tensor, cu_seq: Option<&Tensor>) -> Result<Tensor> {
        let (x, normed) = self.norm2.add_norm(x, &self.attention(&self.norm1.forward(x)?, cu_seq)?)?;
        add(&x, &self.fc2.forward(&gelu(&self.fc1.forward(&normed)?)?)?)
    }
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_documents(x, None)
    }
}
