//! A layer of a Llama or a Qwen2, attention and a gated network, with the names of their checkpoints. It does not know of adapters.
use candle_core::{DType, Device, Module, Result, Tensor};
use candle_ddp::nn::{
    AttentionOptions, Linear, RmsNorm, add, linear_b, linear_no_bias, reshape, rms_norm, rope,
    scaled_dot_product_attention, silu, transpose,
};
use candle_nn::VarBuilder;

/// The sizes of a layer, and in what the two models differ.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) width: usize,
    pub(crate) intermediate: usize,
    pub(crate) heads: usize,
    pub(crate) key_heads: usize,
    /// Whether queries, keys and values have a bias, as in a Qwen2.
    pub(crate) has_bias: bool,
    /// The number that the norms add to the mean of squares.
    pub(crate) eps: f64,
}

pub(crate) struct Layer {
    heads: usize,
    key_heads: usize,
    /// Of queries, keys, values and the output.
    projections: [Linear; 4],
    gate: Linear,
    up: Linear,
    down: Linear,
    norms: [RmsNorm; 2],
}

impl Layer {
    pub(crate) fn new(sizes: Sizes, vb: VarBuilder) -> Result<Self> {
        let Sizes { width, intermediate, heads, key_heads, has_bias, eps } = sizes;
        let (of_keys, attention, mlp) = (width / heads * key_heads, vb.pp("self_attn"), vb.pp("mlp"));
        Ok(Self {
            heads,
            key_heads,
            projections: [
                linear_b(width, width, has_bias, attention.pp("q_proj"))?,
                linear_b(width, of_keys, has_bias, attention.pp("k_proj"))?,
                linear_b(width, of_keys, has_bias, attention.pp("v_proj"))?,
                linear_no_bias(width, width, attention.pp("o_proj"))?,
            ],
            gate: linear_no_bias(width, intermediate, mlp.pp("gate_proj"))?,
            up: linear_no_bias(width, intermediate, mlp.pp("up_proj"))?,
            down: linear_no_bias(intermediate, width, mlp.pp("down_proj"))?,
            norms: [
                rms_norm(width, eps, vb.pp("input_layernorm"))?,
                rms_norm(width, eps, vb.pp("post_attention_layernorm"))?,
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

/// The cosines and sines of the angles of each position. The pair with number `n` of `pairs` turns more slowly than the first one, by
/// `base` to the power of `n / pairs`.
pub(crate) fn rotations(context: usize, pairs: usize, base: f64, dtype: DType, device: &Device) -> Result<[Tensor; 2]> {
    let angle = |position: usize, pair: usize| position as f64 / base.powf(pair as f64 / pairs as f64);
    let angles: Vec<f64> = (0..context * pairs).map(|index| angle(index / pairs, index % pairs)).collect();
    let angles = Tensor::from_vec(angles, (context, pairs), device)?;
    Ok([angles.cos()?.to_dtype(dtype)?, angles.sin()?.to_dtype(dtype)?])
}
