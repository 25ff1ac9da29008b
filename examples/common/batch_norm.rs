//! Batch norms over a rank's own samples, or with `--sync-bn` over those of all ranks.
use candle_ddp::ProcessGroup;
use candle_ddp::nn::sync_batch_norm;
use candle_ddp::vision::models::{NormLayer, ResNetOptions};
use clap::Args;
use std::sync::Arc;

#[derive(Args, Clone, Copy)]
pub(crate) struct BatchNormOptions {
    /// Compute the batch norms' means and variances over the samples of all ranks.
    #[arg(long)]
    pub(crate) sync_bn: bool,
}

impl BatchNormOptions {
    /// Returns the function that makes batch norms. With `--sync-bn` they belong to the ranks of `pg`.
    pub(crate) fn norm_layer(self, pg: &ProcessGroup) -> NormLayer {
        if !self.sync_bn {
            return ResNetOptions::default().norm_layer;
        }
        let pg = pg.clone();
        Arc::new(move |channels, vb| sync_batch_norm(&pg, channels, 1e-5, vb))
    }
}
