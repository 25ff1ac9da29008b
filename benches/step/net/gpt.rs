//! GPTs with blocks of the example `char_gpt`, learned positions, and a separate head.
use super::LossNet;
use super::block::Block;
use candle_core::{DType, Module, Result, Tensor};
use candle_ddp::block;
use candle_ddp::nn::{
    add, checkpoint, embedding, layer_norm, linear_cross_entropy, linear_no_bias, loss, tanh, to_dtype,
};
use candle_nn::{Init, VarBuilder};
use std::sync::Arc;

pub(super) struct Sizes {
    pub(super) vocabulary: usize,
    pub(super) tokens: usize,
    pub(super) width: usize,
    pub(super) heads: usize,
    pub(super) layers: usize,
}

pub(super) const SMALL: Sizes = Sizes { vocabulary: 256, tokens: 256, width: 384, heads: 6, layers: 6 };
/// Those of GPT-2 small.
pub(super) const GPT2: Sizes = Sizes { vocabulary: 50_257, tokens: 1024, width: 768, heads: 12, layers: 12 };
/// Those of GPT-2 medium, and of GPT-3 XL with heads of 128: 350 million parameters, and 1.3 billion.
pub(super) const MEDIUM: Sizes = Sizes { width: 1024, heads: 16, layers: 24, ..GPT2 };
pub(super) const XL: Sizes = Sizes { width: 2048, heads: 16, layers: 24, ..GPT2 };
/// For Muon, whose part of a step depends on the matrices alone.
pub(super) const CAPPED: Sizes = Sizes { vocabulary: 4096, layers: 3, ..SMALL };
/// No logit of a GPT with capped logits is further from 0.
const CAP: f64 = 15.;

/// If it `is_checkpointed`, the backward pass computes each block again.
pub(super) fn gpt(sizes: &Sizes, is_checkpointed: bool, vb: VarBuilder) -> Result<LossNet> {
    let (body, head) =
        (body(sizes, is_checkpointed, &vb)?, linear_no_bias(sizes.width, sizes.vocabulary, vb.pp("head"))?);
    Ok(Box::new(move |x, next| linear_cross_entropy(&body(x)?, head.weight(), None, next)))
}

/// The same with logits that are capped by a hyperbolic tangent.
pub(super) fn capped(sizes: &Sizes, vb: VarBuilder) -> Result<LossNet> {
    let (body, head) = (body(sizes, false, &vb)?, linear_no_bias(sizes.width, sizes.vocabulary, vb.pp("head"))?);
    Ok(Box::new(move |x, next| {
        let logits = to_dtype(&head.forward(&body(x)?)?, DType::F32)?;
        let logits = tanh(&(logits / CAP)?)? * CAP;
        loss::cross_entropy(&logits?.flatten_to(1)?, &next.flatten_all()?)
    }))
}

/// Everything but the head.
fn body(sizes: &Sizes, is_checkpointed: bool, vb: &VarBuilder) -> Result<impl Fn(&Tensor) -> Result<Tensor> + use<>> {
    let Sizes { vocabulary, tokens, width, heads, layers } = *sizes;
    let positions = vb.get_with_hints((tokens, width), "positions", Init::Randn { mean: 0., stdev: 0.02 })?;
    let tokens = embedding(vocabulary, width, vb.pp("tokens"))?;
    let block = |layer| block(vb.pp(format!("blocks.{layer}")), |vb| Block::new(width, heads, vb)).map(Arc::new);
    let blocks = (0..layers).map(block).collect::<Result<Vec<_>>>()?;
    let norm = layer_norm(width, 1e-5, vb.pp("norm"))?;
    Ok(move |x: &Tensor| {
        let x = add(&tokens.forward(x)?, &positions)?;
        let x = blocks.iter().cloned().try_fold(x, |x, block| match is_checkpointed {
            true => checkpoint(&[&x], move |x| block.forward(&x[0])),
            false => block.forward(&x),
        })?;
        norm.forward(&x)
    })
}
