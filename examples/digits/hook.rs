//! The available communication hooks.
use candle_ddp::comm_hook::{Bf16Compress, Fp16Compress, Int8Compress, PowerSgd, PowerSgdOptions};
use candle_ddp::{DistributedDataParallel, Result};
use clap::ValueEnum;

#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum Hook {
    /// Gradients are averaged without compression.
    None,
    /// Gradients are sent in f16.
    Fp16,
    /// Gradients are sent in bf16.
    Bf16,
    /// Gradients are sent in integers of 8 bits.
    Int8,
    /// Matrices are sent as approximations of rank 1, from step 50 on.
    PowerSgd,
}

impl Hook {
    pub(crate) fn register<M>(self, ddp: &DistributedDataParallel<M>) -> Result<()> {
        match self {
            Self::None => Ok(()),
            Self::Fp16 => ddp.register_comm_hook(Fp16Compress::default()),
            Self::Bf16 => ddp.register_comm_hook(Bf16Compress::default()),
            Self::Int8 => ddp.register_comm_hook(Int8Compress::default()),
            Self::PowerSgd => {
                ddp.register_comm_hook(PowerSgd::new(PowerSgdOptions { start_iter: 50, ..Default::default() })?)
            }
        }
    }
}
