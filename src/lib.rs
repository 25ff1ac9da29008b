//! Distributed data-parallel training for [candle]: PyTorch's `DistributedDataParallel` and what belongs to it.
//!
//! Every rank (a process, started by the launcher `ddprun` or by torchrun) trains a copy of the model on its part of the
//! data. The gradients are averaged over the ranks while they come out of the backward pass: they are collected in
//! buckets, and each bucket is all-reduced as soon as it is full, on a thread (or a GPU stream) of its own.
//!
//! ```
//! use candle_core::{DType, Module, Tensor};
//! use candle_ddp::{DdpOptions, DistributedDataParallel, DistributedSampler, SamplerOptions};
//! use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarMap, linear};
//!
//! # fn main() -> candle_ddp::Result<()> {
//! // A real program begins with `let pg = init_process_group(InitOptions::default())?;` and is started with
//! // `ddprun --nproc-per-node 2 PROGRAM`. For a first step, ranks can be threads:
//! candle_ddp::spawn(2, |pg| {
//!     let varmap = VarMap::new();
//!     let build = |vb| linear(4, 1, vb);
//!     let ddp = DistributedDataParallel::new(&pg, &varmap, DType::F32, build, DdpOptions::default())?;
//!     let mut optimizer = AdamW::new(ddp.parameters(), ParamsAdamW::default())?;
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
//! # Where to find what
//! - [`init_process_group`], [`ProcessGroup`]: joining the other ranks, and the collectives among them.
//! - [`DistributedDataParallel`], [`DdpOptions`]: the model.
//! - [`backward()`]: one backward pass through several models.
//! - [`comm_hook`]: what replaces the all-reduce of gradients, such as compression.
//! - [`DataParallel`]: one process that trains on several devices.
//! - [`DistributedSampler`], [`DataLoader`]: each rank's part of the data.
//! - [`optim`]: fused optimizers, gradient clipping, learning-rate schedules, averages of weights.
//! - [`checkpoint`]: saving and loading weights, also those that PyTorch has saved.
//! - [`rendezvous`]: the environment of launchers, and key-value stores that PyTorch understands.
//! - [`amp`]: mixed precision, loss scaling.
//! - [`nn`]: layers: `SyncBatchNorm`, and norms that train fast.
//! - [`seed`]: random numbers that can be repeated and saved, and that differ from rank to rank.
//! - [`trace`]: a time line of the training steps.
//! - [`spawn()`]: ranks as threads of one process.
//! - [`backend`]: the trait that engines implement. The feature `conformance` adds a test suite for them.
//! - [`error`]: what can go wrong.
//!
//! [candle]: https://github.com/huggingface/candle
pub mod amp;
pub mod backend;
pub mod checkpoint;
#[cfg(feature = "conformance")]
pub mod conformance;
pub mod data;
pub mod data_parallel;
pub mod ddp;
mod deadline;
pub mod error;
mod kernels;
#[cfg(feature = "launcher")]
pub mod launch;
pub mod nn;
pub mod optim;
mod panic;
pub mod process_group;
mod random;
pub mod rendezvous;
pub mod seed;
mod state;
mod tensor;
pub mod trace;
mod warnings;

pub use amp::{GradScaler, GradScalerOptions, MixedPrecision};
pub use backend::{ReduceOp, Work};
pub use data::{DataLoader, DistributedSampler, LoaderOptions, SamplerOptions};
pub use data_parallel::{DataParallel, DataParallelOptions};
pub use ddp::{DdpOptions, DistributedDataParallel, DistributedModel, backward, backward_into, comm_hook};
pub use error::{Error, Result};
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
    #[doc = include_str!("../docs/evaluation.md")]
    struct Evaluation;
    #[doc = include_str!("../docs/migrating.md")]
    struct Migrating;
    #[doc = include_str!("../docs/performance.md")]
    struct Performance;
}
