//! DataParallel: one process that trains on several devices. Rank 0 shows the four functions it is made of, one by one, and
//! a model with parts on two devices. Then the same training step is measured with `DataParallel`, on rank 0 alone, and
//! with `DistributedDataParallel`, on all ranks:
//!
//! ```text
//! cargo run --release --bin ddprun -- --nproc-per-node 2 --example data_parallel
//! ```
//!
//! There are as many devices as ranks: GPUs, or else the CPU, where the launcher gives every rank its share of the cores.
//!
//! ci: --steps 2 --width 64 --batch-size 12
#[path = "../common/mod.rs"]
mod common;
mod compare;
mod mlp;
mod parts;
mod primitives;

use candle_core::Device;
use candle_ddp::{ProcessGroup, Result};
use clap::Parser;
use std::num::NonZeroUsize;
use std::process::ExitCode;

/// Show what DataParallel does, and compare it with DistributedDataParallel.
#[derive(Parser)]
struct Options {
    /// The number of measured steps.
    #[arg(long, default_value = "20")]
    steps: NonZeroUsize,
    /// The number of rows of a batch, which the devices share.
    #[arg(long, default_value_t = 256)]
    batch_size: usize,
    /// The width of the layers.
    #[arg(long, default_value_t = 1024)]
    width: usize,
}

fn main() -> ExitCode {
    common::main(run)
}

fn run(pg: &ProcessGroup, options: &Options) -> Result<()> {
    let Options { steps, batch_size, width } = *options;
    let devices = match pg.device().is_cuda() {
        true => (0..pg.world_size()).map(Device::new_cuda_with_stream).collect::<candle_core::Result<_>>()?,
        false => vec![Device::Cpu; pg.world_size()],
    };
    if pg.rank() == 0 {
        primitives::show(&devices, width)?;
        parts::train(&devices[0])?;
    }
    compare::run(pg, &devices, steps.get(), batch_size, width)
}
