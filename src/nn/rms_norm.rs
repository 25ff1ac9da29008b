//! RMS normalisation that can be trained, fast.
use super::layer_norm::{LayerNorm, layer_norm};
use candle_core::{Module, Result, Tensor};
use candle_nn::{LayerNormConfig, VarBuilder};

/// Division by the root of the mean square of the last dimension: a drop-in for [`candle_nn::RmsNorm`], with the same
/// name in the `VarMap` (`weight`), and PyTorch's `RMSNorm`. What is said of [`LayerNorm`] holds for it: candle's own
/// gives no gradients where its input is contiguous.
#[derive(Clone, Debug)]
pub struct RmsNorm(LayerNorm);

impl RmsNorm {
    /// A layer with the given parameter, of the size of the inputs' last dimension.
    pub fn new(weight: Tensor, eps: f64) -> Self {
        Self(LayerNorm::rms_norm(weight, eps))
    }

    /// The same as a layer norm that leaves the mean where it is.
    pub fn into_inner(self) -> LayerNorm {
        self.0
    }

    /// What normalised values are multiplied by.
    pub fn weight(&self) -> &Tensor {
        self.0.weight()
    }

    /// What is added to mean squares.
    pub fn eps(&self) -> f64 {
        self.0.eps()
    }

    /// `forward`, which always is differentiable here; candle's has this name for it.
    pub fn forward_diff(&self, xs: &Tensor) -> Result<Tensor> {
        self.0.forward(xs)
    }
}

impl Module for RmsNorm {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.0.forward(xs)
    }
}

/// An [`RmsNorm`] for inputs whose last dimension is `size`.
pub fn rms_norm(size: usize, eps: f64, vb: VarBuilder) -> Result<RmsNorm> {
    Ok(RmsNorm(layer_norm(size, LayerNormConfig { eps, remove_mean: false, affine: false }, vb)?))
}
