//! A GPT as small ones are trained on a processor: pre-norm blocks, learned positions, no dropout.
use candle_core::{Module, Result, Tensor};
use candle_ddp::nn::{
    AttentionOptions, LayerNorm, Linear, embedding, gelu, layer_norm, linear, linear_no_bias,
    scaled_dot_product_attention,
};
use candle_nn::{FuncT, Init, VarBuilder, func_t};

pub(super) const VOCABULARY: usize = 256;
pub(super) const TOKENS: usize = 256;
const WIDTH: usize = 384;
const HEADS: usize = 6;
const LAYERS: usize = 6;

pub(super) fn gpt(vb: VarBuilder) -> Result<FuncT<'static>> {
    let tokens = embedding(VOCABULARY, WIDTH, vb.pp("tokens"))?;
    let positions = vb.get_with_hints((TOKENS, WIDTH), "positions", Init::Randn { mean: 0., stdev: 0.02 })?;
    let blocks = (0..LAYERS).map(|layer| Block::new(vb.pp(format!("blocks.{layer}")))).collect::<Result<Vec<_>>>()?;
    let norm = layer_norm(WIDTH, 1e-5, vb.pp("norm"))?;
    let head = linear_no_bias(WIDTH, VOCABULARY, vb.pp("head"))?;
    Ok(func_t(move |x, _| {
        let x = tokens.forward(x)?.broadcast_add(&positions)?;
        let x = blocks.iter().try_fold(x, |x, block| block.forward(&x))?;
        head.forward(&norm.forward(&x)?)
    }))
}

struct Block {
    norms: [LayerNorm; 2],
    attention: [Linear; 2],
    mlp: [Linear; 2],
}

impl Block {
    fn new(vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            norms: [layer_norm(WIDTH, 1e-5, vb.pp("norm1"))?, layer_norm(WIDTH, 1e-5, vb.pp("norm2"))?],
            attention: [linear(WIDTH, 3 * WIDTH, vb.pp("qkv"))?, linear(WIDTH, WIDTH, vb.pp("projection"))?],
            mlp: [linear(WIDTH, 4 * WIDTH, vb.pp("fc1"))?, linear(4 * WIDTH, WIDTH, vb.pp("fc2"))?],
        })
    }
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (samples, tokens, _) = x.dims3()?;
        let qkv = self.attention[0].forward(&self.norms[0].forward(x)?)?;
        let qkv = qkv.reshape((samples, tokens, 3, HEADS, WIDTH / HEADS))?.permute((2, 0, 3, 1, 4))?;
        let [q, k, v] = [qkv.get(0)?, qkv.get(1)?, qkv.get(2)?];
        let options = AttentionOptions { is_causal: true, ..Default::default() };
        let y = scaled_dot_product_attention(&q, &k, &v, &options)?;
        let y = y.transpose(1, 2)?.reshape((samples, tokens, WIDTH))?;
        let x = (x + self.attention[1].forward(&y)?)?;
        &x + self.mlp[1].forward(&gelu(&self.mlp[0].forward(&self.norms[1].forward(&x)?)?)?)?
    }
}
