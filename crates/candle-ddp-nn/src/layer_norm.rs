//! Layer and RMS normalisation that can be trained, fast.
use super::row_norm::row_norm;
use candle_core::{Module, Result, Tensor};
pub use candle_nn::LayerNormConfig;
use candle_nn::{Init, VarBuilder};

/// Layer normalisation over the last dimension: a drop-in for [`candle_nn::LayerNorm`], with the same names in the
/// `VarMap` (`weight`, `bias`; `gamma` and `beta` if those are there already), and PyTorch's `LayerNorm`.
///
/// **candle's own layer gives no gradients**, neither to its parameters nor to what comes before it, where its input is
/// contiguous: it takes a faster way then that has no backward pass, and does not say so. This one has a backward pass,
/// and is fused in both directions, on the CPU (see `benches/results/norms_cpu.md`) and on CUDA. Calculates in f32 (f64 for f64 inputs), whatever the dtypes of input and parameters.
#[derive(Clone, Debug)]
pub struct LayerNorm {
    weight: Tensor,
    bias: Option<Tensor>,
    remove_mean: bool,
    eps: f64,
}

impl LayerNorm {
    /// A layer with the given parameters, of the size of the inputs' last dimension.
    pub fn new(weight: Tensor, bias: Tensor, eps: f64) -> Self {
        Self { weight, bias: Some(bias), remove_mean: true, eps }
    }

    /// A layer without bias.
    pub fn new_no_bias(weight: Tensor, eps: f64) -> Self {
        Self { weight, bias: None, remove_mean: true, eps }
    }

    /// A layer that leaves the mean where it is.
    pub fn rms_norm(weight: Tensor, eps: f64) -> Self {
        Self { weight, bias: None, remove_mean: false, eps }
    }

    /// What normalised values are multiplied by.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// What is added to them, if anything.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// What is added to variances.
    pub fn eps(&self) -> f64 {
        self.eps
    }

    /// Whether the mean is taken away.
    pub fn remove_mean(&self) -> bool {
        self.remove_mean
    }
}

impl Module for LayerNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        row_norm(x, &self.weight, self.bias.as_ref(), self.eps, self.remove_mean)
    }
}

/// A [`LayerNorm`] for inputs whose last dimension is `size`. `config` is candle's, or only its `eps`.
pub fn layer_norm<C: Into<LayerNormConfig>>(size: usize, config: C, vb: VarBuilder) -> Result<LayerNorm> {
    let LayerNormConfig { eps, remove_mean, affine } = config.into();
    let get = |names: [&'static str; 2], value| {
        let name = names.into_iter().find(|name| vb.contains_tensor(name)).unwrap_or(names[0]);
        vb.get_with_hints(size, name, Init::Const(value))
    };
    let weight = get(["weight", "gamma"], 1.)?;
    let bias = if affine { Some(get(["bias", "beta"], 0.)?) } else { None };
    Ok(LayerNorm { weight, bias, remove_mean, eps })
}

/// A [`LayerNorm`] without bias.
pub fn layer_norm_no_bias(size: usize, eps: f64, vb: VarBuilder) -> Result<LayerNorm> {
    layer_norm(size, LayerNormConfig { eps, remove_mean: true, affine: false }, vb)
}

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
