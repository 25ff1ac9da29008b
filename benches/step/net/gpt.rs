//! A GPT with blocks of the example `char_gpt`, learned positions, and a separate head.
use super::block::Block;
use candle_core::{Module, Result};
use candle_ddp::nn::{embedding, layer_norm, linear_no_bias};
use candle_nn::{FuncT, Init, VarBuilder, func_t};

pub(super) const VOCABULARY: usize = 256;
pub(super) const TOKENS: usize = 256;
const WIDTH: usize = 384;
const HEADS: usize = 6;
const LAYERS: usize = 6;

pub(super) fn gpt(vb: VarBuilder) -> Result<FuncT<'static>> {
    let tokens = embedding(VOCABULARY, WIDTH, vb.pp("tokens"))?;
    let positions = vb.get_with_hints((TOKENS, WIDTH), "positions", Init::Randn { mean: 0., stdev: 0.02 })?;
    let block = |layer| Block::new(WIDTH, HEADS, vb.pp(format!("blocks.{layer}")));
    let blocks = (0..LAYERS).map(block).collect::<Result<Vec<_>>>()?;
    let norm = layer_norm(WIDTH, 1e-5, vb.pp("norm"))?;
    let head = linear_no_bias(WIDTH, VOCABULARY, vb.pp("head"))?;
    Ok(func_t(move |x, _| {
        let x = tokens.forward(x)?.broadcast_add(&positions)?;
        let x = blocks.iter().try_fold(x, |x, block| block.forward(&x))?;
        head.forward(&norm.forward(&x)?)
    }))
}
