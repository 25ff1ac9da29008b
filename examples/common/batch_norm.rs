//! Batch norms over a rank's own samples, or with `--sync-bn` over those of all ranks.
use candle_core::{ModuleT, Result, Tensor};
use candle_ddp::ProcessGroup;
use candle_ddp::nn::{self, SyncBatchNorm};
use candle_nn::VarBuilder;
use clap::Args;

#[derive(Args, Clone, Copy)]
pub(crate) struct BatchNormOptions {
    /// Compute the batch norms' means and variances over the samples of all ranks.
    #[arg(long)]
    pub(crate) sync_bn: bool,
}

/// A batch norm of either kind. Both have the same variables.
pub(crate) enum BatchNorm {
    Local(nn::BatchNorm),
    Sync(SyncBatchNorm),
}

impl BatchNormOptions {
    /// Makes a batch norm of `channels` channels. With `--sync-bn` it belongs to the ranks of `pg`.
    pub(crate) fn build(self, pg: &ProcessGroup, channels: usize, vb: VarBuilder) -> Result<BatchNorm> {
        Ok(match self.sync_bn {
            true => BatchNorm::Sync(nn::sync_batch_norm(pg, channels, 1e-5, vb)?),
            false => BatchNorm::local(channels, vb)?,
        })
    }
}

impl BatchNorm {
    /// A batch norm over the rank's own samples.
    pub(crate) fn local(channels: usize, vb: VarBuilder) -> Result<Self> {
        Ok(Self::Local(nn::batch_norm(channels, 1e-5, vb)?))
    }

    /// The norm, then a ReLU.
    pub(crate) fn forward_relu_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        match self {
            Self::Local(norm) => norm.forward_relu_t(x, train),
            Self::Sync(norm) => norm.forward_relu_t(x, train),
        }
    }

    /// The norm, plus the input `z` of a residual block, then a ReLU.
    pub(crate) fn forward_add_relu_t(&self, x: &Tensor, z: &Tensor, train: bool) -> Result<Tensor> {
        match self {
            Self::Local(norm) => norm.forward_add_relu_t(x, z, train),
            Self::Sync(norm) => norm.forward_add_relu_t(x, z, train),
        }
    }
}

impl ModuleT for BatchNorm {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        match self {
            Self::Local(norm) => norm.forward_t(x, train),
            Self::Sync(norm) => norm.forward_t(x, train),
        }
    }
}
