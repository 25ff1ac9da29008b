//! Distributed data-parallel training for [candle]: PyTorch's `DistributedDataParallel` and the tools around it.
//!
//! Every rank (a process, started by the launcher `ddprun` or by torchrun) trains a copy of the model on its part of
//! the data. Gradients are averaged over the ranks during the backward pass: they are collected in buckets, and each
//! bucket is all-reduced as soon as it is full, on a separate thread or GPU stream.
//!
//! ```no_run
//! use candle_ddp::nn::{Activation, Sequential, cross_entropy, linear, seq};
//! use candle_ddp::{prelude::*, seed::Generator};
//!
//! fn net(vb: VarBuilder) -> Result<Sequential> {
//!     let (hidden, output) = (linear(784, 128, vb.pp("hidden"))?, linear(128, 10, vb.pp("output"))?);
//!     Ok(seq().add(hidden).add(Activation::Relu).add(output))
//! }
//!
//! fn main() -> Result<()> {
//!     candle_ddp::run(|pg| {
//!         // Your data, the same on all ranks: here noise from one seed, labelled by the sign of its mean.
//!         let images = Generator::new(0).randn(0.0, 1.0, (6000, 784), DType::F32, pg.device())?;
//!         let labels = images.mean(1)?.gt(0.0)?.to_dtype(DType::U32)?;
//!         let data = TensorDataset::new((images, labels))?;
//!         // The loader gives each rank its part of the rows.
//!         let loader = DataLoader::new(data, pg, LoaderOptions { batch_size: 64, ..Default::default() })?;
//!
//!         // All ranks start with rank 0's parameters.
//!         let varmap = VarMap::new();
//!         let ddp = DistributedDataParallel::new(pg, &varmap, net)?;
//!         let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default())?;
//!         for epoch in 0..10 {
//!             let mut losses = 0.0;
//!             for batch in loader.epoch(epoch) {
//!                 let (x, y) = batch?;
//!                 let loss = cross_entropy(&ddp.forward(&x)?, &y)?;
//!                 optimizer.step(&ddp.backward(&loss)?)?; // gradients are averaged over the ranks
//!                 losses += loss.to_scalar::<f32>()?;
//!             }
//!             println!("rank {}, epoch {epoch}: loss {:.4}", pg.rank(), losses / loader.num_batches() as f32);
//!         }
//!         checkpoint::save_distributed(pg, &varmap, "model.safetensors")
//!     })
//! }
//! ```
//!
//! This is the example `minimal`: `ddprun --nproc-per-node 2 --example minimal` runs it on two ranks of this machine. In tests,
//! ranks can be threads: [`spawn()`].
//!
//! # Overview
//! - [`prelude`]: the names that most programs use.
//! - [`run`], [`init_process_group`], [`ProcessGroup`], [`DeviceMesh`]: joining the other ranks, and the collectives among them.
//! - [`DistributedDataParallel`], [`DdpOptions`]: the model.
//! - [`Sharding`], [`block()`]: models and optimizers' states that are spread over the ranks.
//! - [`InitOptions::virtual_ranks`]: runs with the same bits on any number of ranks.
//! - [`backward_with`]: backward passes through several models, of sums over samples, or of several losses before a step.
//! - [`comm_hook`]: replacements for the all-reduce of gradients, such as compression.
//! - [`data_parallel`]: one process that trains on several devices.
//! - [`data`]: each rank's part of the data.
//! - `vision` (with the feature of this name): folders of images, CIFAR, ADE20K, and transforms of images.
//! - [`optim`]: fused optimizers, gradient clipping, learning-rate schedules, averages of weights.
//! - [`checkpoint`]: saving and loading weights, including files that PyTorch has saved; checkpoints of whole runs.
//! - [`rendezvous`]: key-value stores that PyTorch understands, and the secret of a job.
//! - [`amp`]: mixed precision, loss scaling.
//! - [`nn`]: layers and functions with correct gradients that are fast on CPUs, `SyncBatchNorm`, and adapters
//!   ([`LoraConfig`](nn::LoraConfig)).
//! - [`metrics`]: metrics of an evaluation over all ranks, files for TensorBoard, and the speed of training.
//! - [`seed`]: reproducible random numbers that can be saved and differ between ranks.
//! - [`trace`]: a timeline of the training steps.
//! - [`elastic`]: training that continues when a rank dies.
//! - [`flight_recorder`]: the last calls of each rank, for finding out why a run stopped.
//! - [`spawn()`]: ranks as threads of one process.
//! - [`backend`]: the trait that engines implement. The feature `conformance` adds a test suite for them.
//! - [`Error`], [`Failure`]: the error type, and why a group has failed.
#![cfg_attr(docsrs, doc = "- [`guide`]: the pages of the documentation.")]
//!
//! [candle]: https://github.com/huggingface/candle
pub mod amp;
pub mod backend;
pub mod checkpoint;
#[cfg(doctest)]
mod compile_fail;
#[cfg(feature = "conformance")]
pub mod conformance;
pub mod data;
pub mod data_parallel;
mod ddp;
pub mod elastic;
pub mod flight_recorder;
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing;
#[cfg(all(test, not(fuzzing)))]
mod fuzzing;
mod goes_with;
pub mod metrics;
pub mod nn;
pub mod optim;
pub mod prelude;
mod process_group;
pub mod rendezvous;
pub mod seed;
pub mod trace;
mod virtual_ranks;
#[cfg(feature = "vision")]
pub mod vision;

// The modules of the crates that this one is made of.
#[cfg(feature = "nccl")]
use candle_ddp_base::random;
use candle_ddp_base::{deadline, host, panic, thread, warnings};
use candle_ddp_data::origin;
use candle_ddp_state::{cbor, error, hash, placement, state, variables};
use candle_ddp_tensor::{self as tensor, kernels};

pub use backend::batch::P2pOp;
pub use backend::work::Work;
pub use candle_ddp_engine::ReduceOp;
#[doc(inline)]
pub use candle_ddp_state::{Context, Error, Failure, Result};
pub use ddp::{
    Backward, Block, Buckets, DdpOptions, DeviceMemory, DistributedDataParallel, DistributedModel, Guard, JoinOptions,
    Joined, MemoryEstimate, OnNonFinite, Precision, ReplicaCheck, Role, Sharding, Unused, backward_with, block,
    comm_hook, join,
};
pub use process_group::{
    Backend, CustomOptions, DeviceMesh, InitOptions, ProcessGroup, SpawnOptions, StopSignals, WithGrad,
    init_process_group, run, spawn, spawn_with,
};

#[cfg(any(doctest, docsrs))]
macro_rules! pages {
    ($($page:ident)*) => { $(#[doc = include_str!(concat!("../docs/", stringify!($page), ".md"))] pub mod $page {})* };
}

// `scripts/check_links.py` compares the list with the pages.
#[cfg(any(doctest, docsrs))]
macro_rules! all_pages {
    () => {
        pages! {
            checkpoints collectives contrastive converting data elastic elastic_nodes evaluation fine_tuning gpu_layers
            layers measuring memory migrating mixed_precision models no_shared_disk one_gpu optimizers packing performance
            pretrained ranks_that_differ shards speech troubleshooting virtual_ranks watching
        }

        #[cfg(feature = "vision")]
        pages! { vision }
    };
}

/// The Rust code in the README and in `docs/` is compiled with the doc tests. (rustdoc finds no tests in a module under
/// `cfg(any(doctest, docsrs))`, so `guide` is another one.)
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../README.md")]
    struct Readme;

    all_pages! {}
}

/// The pages of `docs/`.
#[cfg(docsrs)]
pub mod guide {
    all_pages! {}
}
