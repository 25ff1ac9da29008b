//! Batch normalisation over the batches of all ranks.
use super::normalise::{Core, Fused};
use crate::Error;
use crate::process_group::ProcessGroup;
use candle_core::{ModuleT, Result, Tensor};
use candle_nn::{BatchNormConfig, VarBuilder};

/// Batch normalisation whose means and variances are those of the batches of all ranks together: PyTorch's
/// `SyncBatchNorm`, and a drop-in for [`candle_nn::BatchNorm`], with the same names in the `VarMap` (`weight`, `bias`,
/// `running_mean`, `running_var`). Made by [`sync_batch_norm`].
///
/// Takes tensors of two and more dimensions, the second of which are the channels: (N, C), (N, C, L), (N, C, H, W),
/// (N, C, D, H, W). Ranks may have batches of different sizes, also empty ones. In training each forward pass makes
/// one collective (an all-gather of means, variances and counts) and each backward pass another (an all-reduce of two
/// sums per channel); the gradients of `weight` and `bias` are those of this rank's batch, for
/// DistributedDataParallel to average. In evaluation, and in a world of one, it does what batch normalisation does
/// anywhere, without collectives.
///
/// **All ranks of the group run the same forward and backward passes in training mode**, whatever the size of their
/// batches: a rank that leaves one out lets the others wait until their time-out. The collectives run on a
/// communicator of their own, which all such layers of the group share and which is connected in the first forward
/// pass in training mode: on that of the gradients' buckets, which become ready at moments that differ from rank to
/// rank, they would come in different orders on different ranks. (On GPUs, NCCL promises that two communicators do not
/// wait for each other only if all ranks start their calls on both in one order. Ranks that run the same layers do. Those
/// that use different parameters may not, and rely on both kinds of kernels finding room on a GPU at once: leave
/// `CUDA_DEVICE_MAX_CONNECTIONS` at its default, not 1.)
///
/// Means and variances are calculated in f32 (in f64 for f64 inputs) also for f16 and bf16; parameters and running
/// statistics may be of another floating-point dtype than the input, as in mixed precision. The passes are fused
/// loops on the CPU, and kernels on CUDA.
///
/// As with candle's `BatchNorm`, PyTorch's `momentum=None` (a cumulative average) and `track_running_stats=False` are not
/// offered.
#[derive(Clone, Debug)]
pub struct SyncBatchNorm {
    group: ProcessGroup,
    core: Core,
}

const INPUT: &str = "the input of SyncBatchNorm";

/// A [`SyncBatchNorm`] over the ranks of `group` for inputs with `num_features` channels. `config` is candle's, or only
/// its `eps`.
///
/// # Errors
/// A config that [`candle_nn::BatchNorm`] refuses as well, and whatever `vb` refuses.
pub fn sync_batch_norm<C: Into<BatchNormConfig>>(
    group: &ProcessGroup,
    num_features: usize,
    config: C,
    vb: VarBuilder,
) -> Result<SyncBatchNorm> {
    Ok(SyncBatchNorm { group: group.clone(), core: Core::new(INPUT, num_features, config.into(), &vb)? })
}

impl SyncBatchNorm {
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

    /// The ranks whose batches are normalised together.
    pub fn process_group(&self) -> &ProcessGroup {
        &self.group
    }

    /// relu(normalised x), in the same pass over memory.
    ///
    /// # Errors
    /// As `forward_t`.
    pub fn forward_relu_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        self.forward(x, train, Fused::Relu)
    }

    /// relu(normalised x + z), in the same pass over memory: the end of a residual block. `z` is like `x`. (Apex's
    /// `BatchNorm2d_NHWC` with `fuse_relu`.)
    ///
    /// # Errors
    /// As `forward_t`; a `z` of another shape, dtype or device.
    pub fn forward_add_relu_t(&self, x: &Tensor, z: &Tensor, train: bool) -> Result<Tensor> {
        self.forward(x, train, Fused::AddRelu(z))
    }

    fn forward(&self, x: &Tensor, train: bool, fused: Fused) -> Result<Tensor> {
        let device = self.group.device();
        if self.group.world_size() > 1 && !x.device().same_device(device) {
            let reason = format!("it is on {:?}, its group's device is {:?}", x.device().location(), device.location());
            return Err(Error::invalid(INPUT, reason).into());
        }
        self.core.forward(x, train, Some(&self.group), fused)
    }
}

impl ModuleT for SyncBatchNorm {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        self.forward(x, train, Fused::Nothing)
    }
}
