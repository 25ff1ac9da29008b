//! Group normalisation.
use super::autocast::wide;
use super::groups::Groups;
use candle_core::{Module, Result, Tensor};
use candle_nn::{Init, VarBuilder};

/// Group normalisation: `torch.nn.GroupNorm`, and a drop-in for [`candle_nn::GroupNorm`] with the same names in the `VarMap` (`weight`,
/// `bias`). Made by [`group_norm`].
///
/// Takes tensors (N, C) or (N, C, …), channels first. Each sample's channels are divided into groups of neighbours; each group is
/// normalised by its own mean and variance, and each channel is then multiplied by its weight and shifted by its bias. Samples do not
/// depend on each other, so training and evaluation are the same. One pass forward and one backward, in f32 for f16 and bf16 too (in
/// f64 for f64 inputs). Parameters may have another floating-point dtype than the input. The result is contiguous, also for inputs in
/// [channels last](crate::MemoryFormat).
///
/// ```
/// # use candle_core::{Device, Module, Result, Tensor};
/// # fn main() -> Result<()> {
/// use candle_ddp_nn::GroupNorm;
/// let of = |values: &[f32]| Tensor::new(values, &Device::Cpu);
/// // Two groups of two channels: the first has the mean 3 and the deviation 2, the other -2 and 1.
/// let layer = GroupNorm::new(of(&[1., 1., 1., 10.])?, of(&[0., 5., 0., 0.])?, 4, 2, 0.0)?;
/// let y = layer.forward(&Tensor::new(&[[1f32, 5., -3., -1.]], &Device::Cpu)?)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[-1., 6., -1., 10.]]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct GroupNorm {
    groups: Groups,
}

impl GroupNorm {
    /// A layer with these parameters, each of shape (`num_channels`).
    ///
    /// # Errors
    /// [`InvalidArgument`](candle_ddp_tensor::Error::Base), carried by candle's error, if `num_groups` is 0 or does not
    /// divide `num_channels`, for parameters of another shape, and for a negative `eps`.
    pub fn new(weight: Tensor, bias: Tensor, num_channels: usize, num_groups: usize, eps: f64) -> Result<Self> {
        Ok(Self { groups: Groups::new(Some((weight, bias)), num_channels, num_groups, eps)? })
    }
}

impl Module for GroupNorm {
    /// # Errors
    /// [`InvalidArgument`](candle_ddp_tensor::Error::Base), carried by candle's error, for an input without channels or
    /// with another number of channels.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.groups.forward(&wide(x)?, "the input of GroupNorm")
    }
}

/// A [`GroupNorm`] for inputs with `num_channels` channels, in `num_groups` groups.
///
/// # Errors
/// As [`GroupNorm::new`], and the errors of `vb`.
pub fn group_norm(num_groups: usize, num_channels: usize, eps: f64, vb: VarBuilder) -> Result<GroupNorm> {
    let (weight, bias) = weight_and_bias(num_channels, &vb)?;
    GroupNorm::new(weight, bias, num_channels, num_groups, eps)
}

/// Weight and bias of each channel.
pub(super) fn weight_and_bias(channels: usize, vb: &VarBuilder) -> Result<(Tensor, Tensor)> {
    let get = |name, value| vb.get_with_hints(channels, name, Init::Const(value));
    Ok((get("weight", 1.)?, get("bias", 0.)?))
}
