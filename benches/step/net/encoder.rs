//! Encoders of the size of ViT-S/16, with norms before and a mean over the tokens, and of BERT-base, with norms after and
//! logits for each token.
use super::LossNet;
use candle_core::{DType, Module, Result, Tensor};
use candle_ddp::nn::{
    AttentionOptions, LayerNorm, Linear, add, conv2d, embedding, flatten, gelu_erf, layer_norm, linear,
    linear_cross_entropy, scaled_dot_product_attention_qkvpacked, to_dtype, transpose,
};
use candle_nn::{Conv2dConfig, FuncT, Init, VarBuilder, func_t};

const LAYERS: usize = 12;
const PATCH: usize = 16;
/// Of ViT-S.
const WIDTH: usize = 384;
/// Of BERT-base.
pub(super) const VOCABULARY: usize = 30_522;
pub(super) const TOKENS: usize = 512;
const BERT_WIDTH: usize = 768;

pub(super) fn vit(image_size: usize, vb: VarBuilder) -> Result<FuncT<'static>> {
    let config = Conv2dConfig { stride: PATCH, ..Default::default() };
    let patches = conv2d(3, WIDTH, PATCH, config, vb.pp("patches"))?;
    let positions = positions((image_size / PATCH).pow(2), WIDTH, &vb)?;
    let blocks = blocks(WIDTH, 6, 1e-6, &vb)?;
    let norm = layer_norm(WIDTH, 1e-6, vb.pp("norm"))?;
    let head = linear(WIDTH, 1000, vb.pp("head"))?;
    Ok(func_t(move |images, _| {
        let x = transpose(&flatten(&patches.forward(images)?, 2, 3)?, 1, 2)?;
        let x = add(&x, &positions)?;
        let x = blocks.iter().try_fold(x, |x, block| block.pre_norm(&x))?;
        let mean = to_dtype(&norm.forward(&x)?, DType::F32)?.mean(1)?;
        head.forward(&to_dtype(&mean, x.dtype())?)
    }))
}

pub(super) fn bert(vb: VarBuilder) -> Result<LossNet> {
    let tokens = embedding(VOCABULARY, BERT_WIDTH, vb.pp("tokens"))?;
    let positions = positions(TOKENS, BERT_WIDTH, &vb)?;
    let norm = layer_norm(BERT_WIDTH, 1e-12, vb.pp("norm"))?;
    let blocks = blocks(BERT_WIDTH, 12, 1e-12, &vb)?;
    let transform = linear(BERT_WIDTH, BERT_WIDTH, vb.pp("transform"))?;
    let transform_norm = layer_norm(BERT_WIDTH, 1e-12, vb.pp("transform_norm"))?;
    let head = linear(BERT_WIDTH, VOCABULARY, vb.pp("head"))?;
    Ok(Box::new(move |x, next| {
        let x = norm.forward(&add(&tokens.forward(x)?, &positions)?)?;
        let x = blocks.iter().try_fold(x, |x, block| block.post_norm(&x))?;
        let x = transform_norm.forward(&gelu_erf(&transform.forward(&x)?)?)?;
        linear_cross_entropy(&x, head.weight(), head.bias(), next)
    }))
}

fn positions(tokens: usize, width: usize, vb: &VarBuilder) -> Result<Tensor> {
    vb.get_with_hints((tokens, width), "positions", Init::Randn { mean: 0., stdev: 0.02 })
}

fn blocks(width: usize, heads: usize, eps: f64, vb: &VarBuilder) -> Result<Vec<Block>> {
    (0..LAYERS).map(|layer| Block::new(width, heads, eps, vb.pp(format!("blocks.{layer}")))).collect()
}

/// Attention and a network of two layers, each with a norm and a residual connection.
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
    fn new(width: usize, heads: usize, eps: f64, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            heads,
            norm1: layer_norm(width, eps, vb.pp("norm1"))?,
            qkv: linear(width, 3 * width, vb.pp("qkv"))?,
            projection: linear(width, width, vb.pp("projection"))?,
            norm2: layer_norm(width, eps, vb.pp("norm2"))?,
            fc1: linear(width, 4 * width, vb.pp("fc1"))?,
            fc2: linear(4 * width, width, vb.pp("fc2"))?,
        })
    }

    fn pre_norm(&self, x: &Tensor) -> Result<Tensor> {
        let x = add(x, &self.attention(&self.norm1.forward(x)?)?)?;
        add(&x, &self.network(&self.norm2.forward(&x)?)?)
    }

    fn post_norm(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.norm1.forward(&add(x, &self.attention(x)?)?)?;
        self.norm2.forward(&add(&x, &self.network(&x)?)?)
    }

    fn attention(&self, x: &Tensor) -> Result<Tensor> {
        let qkv = self.qkv.forward(x)?;
        let y = scaled_dot_product_attention_qkvpacked(&qkv, self.heads, AttentionOptions::default())?;
        self.projection.forward(&y)
    }

    fn network(&self, x: &Tensor) -> Result<Tensor> {
        self.fc2.forward(&gelu_erf(&self.fc1.forward(x)?)?)
    }
}
