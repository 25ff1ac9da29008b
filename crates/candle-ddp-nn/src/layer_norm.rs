//! Fast layer and RMS normalisation with gradients.
use super::row_norm::{add_norm, row_norm};
use candle_core::{Module, Result, Tensor};
pub use candle_nn::LayerNormConfig;
use candle_nn::{Init, VarBuilder};

/// Layer normalisation over the last dimension: a drop-in for [`candle_nn::LayerNorm`], with the same names in the
/// `VarMap` (`weight`, `bias`; `gamma` and `beta` if those are there already), and PyTorch's `LayerNorm`.
///
/// **candle's own layer gives no gradients** to its parameters or to earlier layers if its input is contiguous: it
/// then silently takes a faster path without a backward pass. This layer has a backward pass, and is fused in both
/// directions, on the CPU and on CUDA. It calculates in f32 (f64 for f64 inputs), whatever the dtypes of input and
/// parameters.
///
/// ```
/// # use candle_core::{Device, Module, Result, Tensor};
/// # fn main() -> Result<()> {
/// use candle_ddp_nn::LayerNorm;
/// let [weight, bias] = [1f32, 0.].map(|value| Tensor::full(value, 2, &Device::Cpu));
/// let layer = LayerNorm::new(weight?, bias?, 0.0);
/// let y = layer.forward(&Tensor::new(&[[1f32, 3.], [-5., 5.]], &Device::Cpu)?)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[-1., 1.], [-1., 1.]]);
/// # Ok(())
/// # }
/// ```
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

    /// A layer that does not subtract the mean.
    pub fn rms_norm(weight: Tensor, eps: f64) -> Self {
        Self { weight, bias: None, remove_mean: false, eps }
    }

    /// The factor of the normalised values.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The bias, if there is one.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// The constant that is added to variances.
    pub fn eps(&self) -> f64 {
        self.eps
    }

    /// Whether the mean is subtracted.
    pub fn remove_mean(&self) -> bool {
        self.remove_mean
    }

    /// The "Add & Norm" of a Transformer: `x` + `residual`, a tensor of the shape and dtype of `x`, and the norm of this sum.
    ///
    /// The results and gradients are the same as of [`add`](crate::add) and `forward`. On CUDA, the sum and its norm take one pass over memory
    /// instead of two, unless rows do not consist of whole 16 bytes, or do not fit into registers (8192 elements of f16 and bf16,
    /// 4096 of f32, 2048 of f64).
    ///
    /// # Errors
    /// As [`add`](crate::add) and `forward`.
    pub fn add_norm(&self, x: &Tensor, residual: &Tensor) -> Result<(Tensor, Tensor)> {
        add_norm([x, residual], &self.weight, self.bias.as_ref(), self.eps, self.remove_mean)
    }
}

impl Module for LayerNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        row_norm(x, &self.weight, self.bias.as_ref(), self.eps, self.remove_mean)
    }
}

/// A [`LayerNorm`] for inputs whose last dimension is `size`. `config` is candle's, or only its `eps`.
///
/// # Errors
/// Returns an error if the variables that `vb` has do not have this size.
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
///
/// # Errors
/// Returns an error if the variables that `vb` has do not have this size.
pub fn layer_norm_no_bias(size: usize, eps: f64, vb: VarBuilder) -> Result<LayerNorm> {
    layer_norm(size, LayerNormConfig { eps, remove_mean: true, affine: false }, vb)
}

/// Division by the root of the mean square of the last dimension: a drop-in for [`candle_nn::RmsNorm`], with the same
/// name in the `VarMap` (`weight`), and PyTorch's `RMSNorm`. As with [`LayerNorm`], candle's own layer gives no
/// gradients if its input is contiguous.
///
/// ```
/// # use candle_core::{Device, Module, Result, Tensor};
/// # fn main() -> Result<()> {
/// use candle_ddp_nn::RmsNorm;
/// let layer = RmsNorm::new(Tensor::new(&[1f32, 10.], &Device::Cpu)?, 0.0);
/// let y = layer.forward(&Tensor::new(&[[2f32, 2.], [-4., 4.]], &Device::Cpu)?)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[1., 10.], [-1., 10.]]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct RmsNorm(LayerNorm);

impl RmsNorm {
    /// A layer with the given parameter, of the size of the inputs' last dimension.
    pub fn new(weight: Tensor, eps: f64) -> Self {
        Self(LayerNorm::rms_norm(weight, eps))
    }

    /// The same layer as a layer norm that does not subtract the mean.
    pub fn into_inner(self) -> LayerNorm {
        self.0
    }

    /// The factor of the normalised values.
    pub fn weight(&self) -> &Tensor {
        self.0.weight()
    }

    /// The constant that is added to mean squares.
    pub fn eps(&self) -> f64 {
        self.0.eps()
    }

    /// As [`LayerNorm::add_norm`].
    ///
    /// # Errors
    /// As [`LayerNorm::add_norm`].
    pub fn add_norm(&self, x: &Tensor, residual: &Tensor) -> Result<(Tensor, Tensor)> {
        self.0.add_norm(x, residual)
    }

    /// The same as `forward`, which is always differentiable here. candle has this name for its differentiable
    /// version.
    ///
    /// # Errors
    /// As `forward`.
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
///
/// # Errors
/// Returns an error if the variables that `vb` has do not have this size.
pub fn rms_norm(size: usize, eps: f64, vb: VarBuilder) -> Result<RmsNorm> {
    Ok(RmsNorm(layer_norm(size, LayerNormConfig { eps, remove_mean: false, affine: false }, vb)?))
}
