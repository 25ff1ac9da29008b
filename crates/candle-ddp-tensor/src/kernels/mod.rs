//! CUDA kernels for layers, optimizers, clipping, loss scaling and DDP's copies. `README.md` in this folder describes
//! how they are built, launched and tested. `upload.rs` copies from pinned host memory, without a kernel.
//!
//! Their CPU counterparts, with the same arithmetic, are in candle-ddp's `optim` and `amp`, and in candle-ddp-nn.
// Kernels are launched here. Every block states why it is sound.
#![allow(unsafe_code)]

// Without the feature, the same functions return an error.
#[cfg(not(feature = "cuda"))]
mod absent;
#[cfg(feature = "cuda")]
pub mod address;
#[cfg(feature = "cuda")]
mod attend;
#[cfg(any(feature = "cuda", test))]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))] // its tests need no CUDA
mod cache;
#[cfg(feature = "cuda")]
mod compile;
#[cfg(feature = "cuda")]
mod convolve;
#[cfg(feature = "cudnn")]
mod cudnn;
#[cfg(feature = "cuda")]
mod epilogue;
#[cfg(feature = "cuda")]
mod gpu;
#[cfg(feature = "cuda")]
mod handles;
#[cfg(feature = "cuda")]
mod incoming;
mod launches;
#[cfg(feature = "cuda")]
mod layer;
#[cfg(feature = "cuda")]
mod norm;
#[cfg(feature = "cuda")]
mod norm_tensors;
mod operands;
#[cfg(feature = "cuda")]
mod pool;
#[cfg(feature = "cuda")]
mod product;
#[cfg(feature = "cuda")]
mod program;
#[cfg_attr(not(feature = "cuda"), allow(dead_code))] // needed only by NVRTC
mod source;
#[cfg(feature = "cuda")]
mod table;
#[cfg(feature = "cuda")]
mod temporary;
#[cfg(feature = "cuda")]
mod tensors;
#[cfg(feature = "cuda")]
mod upload;
#[cfg(feature = "cuda")]
mod uploaded;

#[cfg(not(feature = "cuda"))]
pub use absent::*;
#[cfg(feature = "cuda")]
pub use address::release;
#[cfg(feature = "cuda")]
pub use attend::{attend, is_attention_fast, may_attend};
#[cfg(feature = "cuda")]
pub use convolve::{can_convolve, convolve, has_cudnn};
#[cfg(feature = "cuda")]
pub use epilogue::product_with;
#[cfg(feature = "cuda")]
pub use gpu::preload;
#[cfg(feature = "cuda")]
pub use incoming::Incoming;
pub use launches::{
    Address, AttendShape, AttendTensors, COLUMNS, ConvShape, Convolve, Epilogue, Factor, Grid, Launch, Product,
    THREADS, Target, blocks_of_rows, dtype_number, lanes, supported,
};
#[cfg(feature = "cuda")]
pub use layer::{Output, address, address_or_none, launch, storage_address, written_address};
#[cfg(feature = "cuda")]
pub use norm_tensors::*;
pub use operands::{AddedNorm, Assignment, Extent, NormOperands, Operands, Rule, Scalars, scalars};
#[cfg(feature = "cuda")]
pub use pool::{keep_memory, peak_memory};
#[cfg(feature = "cuda")]
pub use product::{product, scaled_product};
pub use source::Kernel;
#[cfg(feature = "cuda")]
pub use temporary::Temporary;
#[cfg(feature = "cuda")]
pub use tensors::*;
#[cfg(feature = "cuda")]
pub use upload::{Pinned, Upload, Uploader};
#[cfg(feature = "cuda")]
pub use uploaded::Constants;
