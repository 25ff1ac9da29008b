//! A block of a Llama: attention and a gated network, with the names of its checkpoints.
use candle_core::{Module, Result, Tensor};
use candle_ddp::nn::{
    AttentionOptions, Linear, RmsNorm, add, linear_no_bias, reshape, rms_norm, rope, scaled_dot_product_attention,
    silu, transpose,
};
use candle_nn::VarBuilder;

pub(crate) struct Block {
    heads: usize,
    key_heads: usize,
    /// Of queries, keys, values and the output.
    projections: [Linear; 4],
    gate: Linear,
    up: Linear,
    down: Linear,
    norms: [RmsNorm; 2],
}

impl Block {
    pub(crate) fn new(width: usize, heads: usize, key_heads: usize, vb: VarBuilder) -> Result<Self> {
        let (of_keys, attention, mlp) = (width / heads * key_heads, vb.pp("self_attn"), vb.pp("mlp"));
        // Llama's two thirds of the usual factor of 4, as a multiple of 32.
        let intermediate = (width * 8 / 3).next_multiple_of(32);
        Ok(Self {
            heads,
            key_heads,
            projections: [
                linear_no_bias(width, width, attention.pp("q_proj"))?,
                linear_no_bias(width, of_keys, attention.pp("k_proj"))?,
                linear_no_bias(width, of_keys, attention.pp("v_proj"))?,
                linear_no_bias(width, width, attention.pp("o_proj"))?,
            ],
            gate: linear_no_bias(width, intermediate, mlp.pp("gate_proj"))?,
            up: linear_no_bias(width, intermediate, mlp.pp("up_proj"))?,
            down: linear_no_bias(intermediate, width, mlp.pp("down_proj"))?,
            norms: [
                rms_norm(width, 1e-5, vb.pp("input_layernorm"))?,
                rms_norm(width, 1e-5, vb.pp("post_attention_layernorm"))?,
            ],
        })
    }

    /// With the rotations of each position, and documents that share rows if `cu_seq` says where they begin.
    pub(crate) fn forward(&self, x: &Tensor, [cos, sin]: &[Tensor; 2], cu_seq: Option<&Tensor>) -> Result<Tensor> {
        let (samples, tokens, width) = x.dims3()?;
        let normed = self.norms[0].forward(x)?;
        let split = |projection: &Linear, heads: usize| {
            transpose(&reshape(&projection.forward(&normed)?, (samples, tokens, heads, ()))?, 1, 2)
        };
        let [query, key, value, output] = &self.projections;
        let query = rope(&split(query, self.heads)?.contiguous()?, cos, sin)?;
        let key = rope(&split(key, self.key_heads)?.contiguous()?, cos, sin)?;
        let options = AttentionOptions { is_causal: true, cu_seq: cu_seq.cloned(), ..Default::default() };
        let y = scaled_dot_product_attention(&query, &key, &split(value, self.key_heads)?, options)?;
        let y = output.forward(&reshape(&transpose(&y, 1, 2)?, (samples, tokens, width))?)?;
        let (x, normed) = self.norms[1].add_norm(x, &y)?;
        let gated = (silu(&self.gate.forward(&normed)?)? * self.up.forward(&normed)?)?;
        add(&x, &self.down.forward(&gated)?)
    }
}
