//! Layers and functions with correct gradients that are fast on CPUs: everything in [`candle_ddp_nn`], a drop-in for candle-nn,
//! and [`sync_batch_norm`].
use crate::backend::Purpose;
use crate::goes_with::Feature;
use crate::process_group::ProcessGroup;
use crate::{Error, ReduceOp};
use candle_core::{Result, Tensor};
#[doc(no_inline)]
pub use candle_ddp_nn::*;
use std::sync::Arc;

static BATCH_NORM: Purpose = Purpose::of("SyncBatchNorm's statistics");
static BATCH_NORM_BACKWARD: Purpose = Purpose::of("SyncBatchNorm's gradients");

/// A [`BatchNorm`] that, in training, computes means and variances over the batches of all ranks of `group` together:
/// PyTorch's `SyncBatchNorm`. It has the same names in the `VarMap` (`weight`, `bias`, `running_mean`,
/// `running_var`). `config` is candle's, or only its `eps`.
///
/// Ranks may have batches of different sizes, even empty ones. In training each forward pass makes one collective (an
/// all-gather of means, variances and counts) and each backward pass another (an all-reduce of two sums per channel).
/// The gradients of `weight` and `bias` come from this rank's batch, for DistributedDataParallel to average. In
/// evaluation, and in a world of one, the layer makes no collectives.
///
/// **All ranks of the group run the same forward and backward passes in training mode**, whatever the size of their
/// batches: if a rank leaves one out, the others wait until their time-out. The collectives run on a separate
/// communicator, which all such layers of the group share and which is connected in the first forward pass in
/// training mode. On the communicator of the gradients' buckets, their order would differ between ranks, because
/// buckets become ready at different moments on different ranks. (On GPUs, NCCL promises that two communicators do
/// not wait for each other only if all ranks start their calls on both in one order. Ranks that run the same layers
/// do. Ranks that use different parameters may not, and rely on both kinds of kernels finding room on a GPU at once:
/// with `CUDA_DEVICE_MAX_CONNECTIONS` below 8, the layer is an error.)
///
/// # Errors
/// Returns an error for a config that [`candle_nn::BatchNorm`] refuses too, the errors of `vb`, and
/// [`Error::InvalidArgument`] in a group with [virtual ranks](crate::InitOptions::virtual_ranks).
pub fn sync_batch_norm<C: Into<BatchNormConfig>>(
    group: &ProcessGroup,
    num_features: usize,
    config: C,
    vb: VarBuilder,
) -> Result<BatchNorm> {
    if group.virtual_ranks().is_some() {
        Feature::SyncBatchNorm.goes_with(Feature::VirtualRanks)?;
    }
    Ok(batch_norm(num_features, config, vb)?.synchronised(Arc::new(group.clone())))
}

/// The group for the layers' collectives. The first call connects it.
fn statistics_group(group: &ProcessGroup) -> std::result::Result<ProcessGroup, Error> {
    group.companion().map_err(|error| match error {
        Error::Connect { rank, peers, timeout, reason } => {
            let reason = format!(
                "SyncBatchNorm connects all ranks for its statistics in their first forward pass in training mode: run it on \
                 every rank, and evaluate with forward_t(x, false). The cause: {reason}"
            );
            Error::Connect { rank, peers, timeout, reason }
        }
        error => error,
    })
}

const INPUT: &str = "the input of SyncBatchNorm";

impl BatchNormGroup for ProcessGroup {
    fn world_size(&self) -> usize {
        self.world_size()
    }

    fn check(&self, x: &Tensor) -> Result<()> {
        if !x.device().same_device(self.device()) {
            let (is, needed) = (x.device().location(), self.device().location());
            return Err(Error::invalid(
                INPUT,
                format!(
                    "it must be on the device of the layer's group, {needed:?}, not \
                                                      on {is:?}"
                ),
            )
            .into());
        }
        if self.virtual_ranks().is_some() {
            Feature::SyncBatchNorm.goes_with(Feature::VirtualRanks)?;
        }
        if self.current_join().is_some() {
            Feature::SyncBatchNorm.goes_with(Feature::Join)?;
        }
        Ok(())
    }

    fn all_gather(&self, mine: &Tensor) -> Result<Tensor> {
        let all = Tensor::zeros((self.world_size(), mine.elem_count()), mine.dtype(), mine.device())?;
        let group = statistics_group(self)?;
        BATCH_NORM.during(|| group.all_gather(&all, mine))?;
        Ok(all)
    }

    fn all_reduce(&self, sums: &Tensor) -> Result<()> {
        let group = statistics_group(self)?;
        Ok(BATCH_NORM_BACKWARD.during(|| group.all_reduce(sums, ReduceOp::Sum))?)
    }
}
