//! Batch normalisation of the local batch.
use super::normalise::{Core, Fused};
use candle_core::{ModuleT, Result, Tensor};
use candle_nn::{BatchNormConfig, VarBuilder};

/// Batch normalisation: `torch.nn.BatchNorm1d` to `3d`, and a drop-in for [`candle_nn::BatchNorm`] with the same names in the
/// `VarMap` (`weight`, `bias`, `running_mean`, `running_var`). Made by [`batch_norm`].
///
/// Takes tensors of two and more dimensions, the second of which are the channels: (N, C), (N, C, L), (N, C, H, W),
/// (N, C, D, H, W). Means and variances are calculated in f32 (in f64 for f64 inputs) also for f16 and bf16; parameters and
/// running statistics may be of another floating-point dtype than the input, as in mixed precision. The passes are fused
/// loops on the CPU and kernels on CUDA; there are none for Metal.
///
/// [`BatchNorm::forward_relu_t`] and [`BatchNorm::forward_add_relu_t`] do what usually follows in the same pass over memory.
///
/// As with candle's `BatchNorm`, PyTorch's `momentum=None` (a cumulative average) and `track_running_stats=False` are not
/// offered.
#[derive(Clone, Debug)]
pub struct BatchNorm {
    core: Core,
}

const INPUT: &str = "the input of BatchNorm";

/// A [`BatchNorm`] for inputs with `num_features` channels. `config` is candle's, or only its `eps`.
///
/// # Errors
/// A config that [`candle_nn::BatchNorm`] refuses as well, and whatever `vb` refuses.
pub fn batch_norm<C: Into<BatchNormConfig>>(num_features: usize, config: C, vb: VarBuilder) -> Result<BatchNorm> {
    Ok(BatchNorm { core: Core::new(INPUT, num_features, config.into(), &vb)? })
}

impl BatchNorm {
    /// A layer of these parameters and running statistics, each of shape (`num_features`). Variables among the statistics are
    /// shared; other tensors are copied.
    ///
    /// # Errors
    /// A tensor of another shape, or a negative `eps`.
    pub fn new(
        num_features: usize,
        running_mean: Tensor,
        running_var: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: f64,
    ) -> Result<Self> {
        Self::new_with_momentum(num_features, running_mean, running_var, weight, bias, eps, 0.1)
    }

    /// A layer without parameters.
    ///
    /// # Errors
    /// As [`BatchNorm::new`].
    pub fn new_no_bias(num_features: usize, running_mean: Tensor, running_var: Tensor, eps: f64) -> Result<Self> {
        Self::new_no_bias_with_momentum(num_features, running_mean, running_var, eps, 0.1)
    }

    /// [`BatchNorm::new`] with a `momentum` from 0 to 1.
    ///
    /// # Errors
    /// As [`BatchNorm::new`], and a momentum outside of 0 to 1.
    pub fn new_with_momentum(
        num_features: usize,
        running_mean: Tensor,
        running_var: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: f64,
        momentum: f64,
    ) -> Result<Self> {
        let config = BatchNormConfig { eps, momentum, ..Default::default() };
        let core = Core::of(INPUT, num_features, config, [running_mean, running_var], Some((weight, bias)))?;
        Ok(Self { core })
    }

    /// [`BatchNorm::new_no_bias`] with a `momentum` from 0 to 1.
    ///
    /// # Errors
    /// As [`BatchNorm::new_with_momentum`].
    pub fn new_no_bias_with_momentum(
        num_features: usize,
        running_mean: Tensor,
        running_var: Tensor,
        eps: f64,
        momentum: f64,
    ) -> Result<Self> {
        let config = BatchNormConfig { eps, momentum, affine: false, ..Default::default() };
        Ok(Self { core: Core::of(INPUT, num_features, config, [running_mean, running_var], None)? })
    }

    /// `forward_t` in training mode.
    ///
    /// # Errors
    /// As `forward_t`.
    pub fn forward_train(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_t(x, true)
    }

    /// The running mean of each channel.
    pub fn running_mean(&self) -> &Tensor {
        self.core.running_mean.as_tensor()
    }

    /// The running variance of each channel.
    pub fn running_var(&self) -> &Tensor {
        self.core.running_var.as_tensor()
    }

    /// What is added to variances.
    pub fn eps(&self) -> f64 {
        self.core.config.eps
    }

    /// The weight of the newest batch in the running statistics.
    pub fn momentum(&self) -> f64 {
        self.core.config.momentum
    }

    /// The parameters, unless the layer was made without (`affine: false`).
    pub fn weight_and_bias(&self) -> Option<(&Tensor, &Tensor)> {
        self.core.weight_and_bias.as_ref().map(|(weight, bias)| (weight, bias))
    }

    /// relu(normalised x), in the same pass over memory.
    ///
    /// # Errors
    /// As `forward_t`.
    pub fn forward_relu_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        self.core.forward(x, train, None, Fused::Relu)
    }

    /// relu(normalised x + z), in the same pass over memory: the end of a residual block. `z` is like `x`. (Apex's
    /// `BatchNorm2d_NHWC` with `fuse_relu`.)
    ///
    /// # Errors
    /// As `forward_t`; a `z` of another shape, dtype or device.
    pub fn forward_add_relu_t(&self, x: &Tensor, z: &Tensor, train: bool) -> Result<Tensor> {
        self.core.forward(x, train, None, Fused::AddRelu(z))
    }
}

impl ModuleT for BatchNorm {
    /// # Errors
    /// An input without channels, or with another number of them; in training fewer than two values per channel, which have
    /// no variance.
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        self.core.forward(x, train, None, Fused::Nothing)
    }
}
