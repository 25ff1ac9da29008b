//! Batch norms over a rank's own samples, or with `--sync-bn` over those of all ranks.
use candle_core::Result;
use candle_ddp::ProcessGroup;
use candle_ddp::nn::{BatchNorm, batch_norm, sync_batch_norm};
use candle_nn::VarBuilder;
use clap::Args;

#[derive(Args, Clone, Copy)]
pub(crate) struct BatchNormOptions {
    /// Compute the batch norms' means and variances over the samples of all ranks.
    #[arg(long)]
    pub(crate) sync_bn: bool,
}

impl BatchNormOptions {
    /// Makes a batch norm of `channels` channels. With `--sync-bn` it belongs to the ranks of `pg`.
    pub(crate) fn build(self, pg: &ProcessGroup, channels: usize, vb: VarBuilder) -> Result<BatchNorm> {
        match self.sync_bn {
            true => sync_batch_norm(pg, channels, 1e-5, vb),
            false => batch_norm(channels, 1e-5, vb),
        }
    }
}
