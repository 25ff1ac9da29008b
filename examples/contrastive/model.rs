//! A tower for pictures and one for captions, whose features have length 1.
use super::pictures::{SIZE, VALUES, WORDS};
use candle_core::{D, Module, Result, Tensor};
use candle_ddp::nn::{Conv2d, Conv2dConfig, Embedding, Linear, conv2d, embedding, flatten, gelu, linear};
use candle_nn::{Init, VarBuilder};

const CHANNELS: usize = 16;
/// Of the features.
const WIDTH: usize = 32;

pub(crate) struct Net {
    convolutions: [Conv2d; 2],
    projection: Linear,
    words: Option<(Embedding, Linear)>,
    /// The logarithm of the inverse temperature, which CLIP learns.
    pub(crate) scale: Option<Tensor>,
}

impl Net {
    pub(crate) fn new(has_captions: bool, vb: VarBuilder) -> Result<Self> {
        let config = Conv2dConfig { stride: 2, padding: 1, ..Default::default() };
        let inner = SIZE / 4;
        let words = || {
            Ok::<_, candle_core::Error>((
                embedding(WORDS * VALUES, WIDTH, vb.pp("words"))?,
                linear(WORDS * WIDTH, WIDTH, vb.pp("text"))?,
            ))
        };
        Ok(Self {
            convolutions: [
                conv2d(1, CHANNELS, 3, config, vb.pp("conv1"))?,
                conv2d(CHANNELS, 2 * CHANNELS, 3, config, vb.pp("conv2"))?,
            ],
            projection: linear(2 * CHANNELS * inner * inner, WIDTH, vb.pp("projection"))?,
            words: has_captions.then(words).transpose()?,
            scale: has_captions.then(|| vb.get_with_hints((), "scale", Init::Const(2.0))).transpose()?,
        })
    }

    /// From pictures (batch, 1, 12, 12).
    pub(crate) fn picture(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.convolutions.iter().try_fold(x.clone(), |x, convolution| gelu(&convolution.forward(&x)?))?;
        normalise(&self.projection.forward(&flatten(&x, 1, D::Minus1)?)?)
    }

    /// From captions u32 (batch, 4).
    pub(crate) fn caption(&self, words: &Tensor) -> Result<Tensor> {
        let Some((embedding, text)) = &self.words else { candle_core::bail!("this model has no captions") };
        normalise(&text.forward(&flatten(&embedding.forward(words)?, 1, 2)?)?)
    }
}

/// Each row at length 1.
fn normalise(x: &Tensor) -> Result<Tensor> {
    x.broadcast_div(&(x.sqr()?.sum_keepdim(D::Minus1)? + 1e-12)?.sqrt()?)
}
