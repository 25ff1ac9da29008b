//! Distributed data-parallel training for [candle]: PyTorch's `DistributedDataParallel` and what belongs to it.
//!
//! Every rank (a process, started by the launcher `ddprun` or by torchrun) trains a copy of the model on its part of
//! the data. Gradients are averaged over the ranks during the backward pass: they are collected in buckets, and each
//! bucket is all-reduced as soon as it is full, on a separate thread or GPU stream.
//!
//! ```
//! use candle_core::{DType, Module, Tensor};
//! use candle_ddp::nn::linear;
//! use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW};
//! use candle_ddp::{DdpOptions, DistributedDataParallel, DistributedSampler, SamplerOptions};
//! use candle_nn::VarMap;
//!
//! # fn main() -> candle_ddp::Result<()> {
//! // A real program begins with `let pg = init_process_group(InitOptions::default())?;` and is started with
//! // `ddprun --nproc-per-node 2 PROGRAM`. For a first step, ranks can be threads:
//! candle_ddp::spawn(2, |pg| {
//!     let varmap = VarMap::new();
//!     let build = |vb| linear(4, 1, vb);
//!     let ddp = DistributedDataParallel::new(&pg, &varmap, DType::F32, build, DdpOptions::default())?;
//!     let mut optimizer = AdamW::from_named(ddp.named_parameters(), ParamsAdamW::default())?;
//!
//!     let data = Tensor::randn(0f32, 1.0, (100, 4), pg.device())?;
//!     let mut sampler = DistributedSampler::new(100, pg.world_size(), pg.rank(), SamplerOptions::default())?;
//!     for epoch in 0..2 {
//!         sampler.set_epoch(epoch);
//!         let mine: Vec<u32> = sampler.iter().map(|index| index as u32).collect();
//!         for batch in mine.chunks(10) {
//!             let x = data.index_select(&Tensor::new(batch, pg.device())?, 0)?;
//!             let loss = (ddp.forward(&x)? - x.sum_keepdim(1)?)?.sqr()?.mean_all()?;
//!             let grads = ddp.backward(&loss)?; // averaged over the ranks
//!             optimizer.step(&grads)?;
//!         }
//!     }
//!     Ok(())
//! })?;
//! # Ok(())
//! # }
//! ```
//!
//! # Overview
//! - [`init_process_group`], [`ProcessGroup`]: joining the other ranks, and the collectives among them.
//! - [`DistributedDataParallel`], [`DdpOptions`]: the model.
//! - [`backward()`]: one backward pass through several models.
//! - [`comm_hook`]: replacements for the all-reduce of gradients, such as compression.
//! - [`DataParallel`]: one process that trains on several devices.
//! - [`DistributedSampler`], [`DataLoader`], [`StatefulDataLoader`]: each rank's part of the data.
//! - `vision` (with the feature of this name): folders of images, CIFAR, ADE20K, and transforms of images.
//! - [`optim`]: fused optimizers, gradient clipping, learning-rate schedules, averages of weights.
//! - [`checkpoint`]: saving and loading weights, including files that PyTorch has saved; checkpoints of whole runs.
//! - [`rendezvous`]: the environment of launchers, and key-value stores that PyTorch understands.
//! - [`amp`]: mixed precision, loss scaling.
//! - [`nn`]: layers and functions with correct gradients that are fast on CPUs, and `SyncBatchNorm`.
//! - [`seed`]: reproducible random numbers that can be saved and differ between ranks.
//! - [`trace`]: a timeline of the training steps.
//! - [`elastic`]: training that goes on when a rank dies.
//! - [`flight_recorder`]: the last calls of each rank, for finding out why a run stopped.
//! - [`spawn()`]: ranks as threads of one process.
//! - [`backend`]: the trait that engines implement. The feature `conformance` adds a test suite for them.
//! - [`error`]: the error type.
//!
//! [candle]: https://github.com/huggingface/candle
pub mod amp;
pub mod backend;
mod cbor;
pub mod checkpoint;
#[cfg(feature = "conformance")]
pub mod conformance;
pub mod data;
pub mod data_parallel;
pub mod ddp;
pub mod elastic;
pub mod error;
pub mod flight_recorder;
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing;
#[cfg(all(test, not(fuzzing)))]
mod fuzzing;
mod hash;
#[cfg(test)]
mod kernel_tests;
pub mod nn;
pub mod optim;
pub mod process_group;
pub mod rendezvous;
pub mod seed;
mod state;
pub mod trace;
mod variables;
#[cfg(feature = "vision")]
pub mod vision;

// The modules of the crates that this one is made of.
use candle_ddp_rendezvous::{deadline, descriptors, host, panic, random, warnings};
use candle_ddp_tensor::{self as tensor, kernels};

pub use amp::{GradScaler, GradScalerOptions, MixedPrecision};
pub use backend::{ReduceOp, Work};
pub use data::{DataLoader, DistributedSampler, LoaderOptions, SamplerOptions, StatefulDataLoader};
pub use data_parallel::{DataParallel, DataParallelOptions};
pub use ddp::{
    DdpOptions, DistributedDataParallel, DistributedModel, JoinOptions, Joined, Unused, backward, backward_into,
    comm_hook, join,
};
pub use error::{Error, Result};
pub use flight_recorder::FlightRecorderOptions;
pub use process_group::{
    Backend, CustomOptions, InitOptions, ProcessGroup, SpawnOptions, init_process_group, spawn, spawn_with,
};
pub use seed::seed_everything;

/// The Rust code in the README and in `docs/` is compiled with the doc tests.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../README.md")]
    struct Readme;
    #[doc = include_str!("../docs/checkpoints.md")]
    struct Checkpoints;
    #[doc = include_str!("../docs/data.md")]
    struct Data;
    #[doc = include_str!("../docs/elastic.md")]
    struct Elastic;
    #[doc = include_str!("../docs/evaluation.md")]
    struct Evaluation;
    #[doc = include_str!("../docs/migrating.md")]
    struct Migrating;
    #[doc = include_str!("../docs/performance.md")]
    struct Performance;
    #[doc = include_str!("../docs/troubleshooting.md")]
    struct Troubleshooting;

    #[cfg(feature = "vision")]
    #[doc = include_str!("../docs/vision.md")]
    struct Vision;
}
