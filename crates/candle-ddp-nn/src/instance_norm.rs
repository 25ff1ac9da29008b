//! Instance normalisation.
use super::group_norm::weight_and_bias;
use super::groups::Groups;
use candle_core::{Module, Result, Tensor};
use candle_ddp_tensor::Error;
use candle_ddp_tensor::error::describe;
use candle_nn::VarBuilder;

/// The options of [`instance_norm`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InstanceNormConfig {
    /// The constant that is added to variances.
    pub eps: f64,
    /// Whether each channel has a weight and a bias.
    pub affine: bool,
}

/// PyTorch's: an `eps` of 1e-5, and no parameters.
impl Default for InstanceNormConfig {
    fn default() -> Self {
        Self { eps: 1e-5, affine: false }
    }
}

impl From<f64> for InstanceNormConfig {
    fn from(eps: f64) -> Self {
        Self { eps, ..Self::default() }
    }
}

/// Instance normalisation: `torch.nn.InstanceNorm1d` to `3d` of batches, with the same names in the `VarMap` (`weight`, `bias`). Made by
/// [`instance_norm`].
///
/// Takes tensors (N, C, …), and normalises each channel of each sample by its own mean and variance: [`GroupNorm`](crate::GroupNorm) with one channel in
/// a group, and its dtypes. It lacks PyTorch's running statistics (`track_running_stats`, off by default there too).
///
/// ```
/// # use candle_core::{Device, Module, Result, Tensor};
/// # fn main() -> Result<()> {
/// use candle_ddp_nn::InstanceNorm;
/// let layer = InstanceNorm::new(2, None, 0.0)?;
/// let y = layer.forward(&Tensor::new(&[[[1f32, 3.], [-5., 5.]]], &Device::Cpu)?)?;
/// assert_eq!(y.to_vec3::<f32>()?, [[[-1., 1.], [-1., 1.]]]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct InstanceNorm {
    groups: Groups,
}

impl InstanceNorm {
    /// A layer with these parameters, if there are any, each of shape (`num_features`).
    ///
    /// # Errors
    /// [`InvalidArgument`](Error::Base), carried by candle's error, for parameters of another shape, and for a negative `eps`.
    pub fn new(num_features: usize, weight_and_bias: Option<(Tensor, Tensor)>, eps: f64) -> Result<Self> {
        Ok(Self { groups: Groups::new(weight_and_bias, num_features, num_features.max(1), eps)? })
    }
}

impl Module for InstanceNorm {
    /// # Errors
    /// [`InvalidArgument`](Error::Base), carried by candle's error, for an input with another number of channels, or with a single number in
    /// each channel, which has no variance.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        const INPUT: &str = "the input of InstanceNorm";
        if x.rank() >= 2 && x.dims()[2..].iter().product::<usize>() == 1 {
            let is = describe(x.dtype(), x.shape());
            let reason = format!(
                "each channel of a sample must have two numbers or more, since one has no variance, but it is {is}"
            );
            return Err(Error::invalid(INPUT, reason).into());
        }
        self.groups.forward(x, INPUT)
    }
}

/// An [`InstanceNorm`] for inputs with `num_features` channels. `config` may be only its `eps`.
///
/// # Errors
/// As [`InstanceNorm::new`], and the errors of `vb`, which a layer without parameters does not use.
pub fn instance_norm<C: Into<InstanceNormConfig>>(
    num_features: usize,
    config: C,
    vb: VarBuilder,
) -> Result<InstanceNorm> {
    let InstanceNormConfig { eps, affine } = config.into();
    let parameters = if affine { Some(weight_and_bias(num_features, &vb)?) } else { None };
    InstanceNorm::new(num_features, parameters, eps)
}
