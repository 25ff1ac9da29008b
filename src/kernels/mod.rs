//! CUDA kernels for layers, optimizers, clipping, loss scaling and DDP's copies. `README.md` in this folder describes
//! how they are built, launched and tested. `upload.rs` copies from pinned host memory, without a kernel.
//!
//! Their CPU counterparts, with the same arithmetic, are in [`optim`](crate::optim), [`amp`](crate::amp) and
//! [`nn`](crate::nn).
// Kernels are launched here. Every block states why it is sound.
#![allow(unsafe_code)]

// Without the feature, the same functions return an error.
#[cfg(not(feature = "cuda"))]
mod absent;
#[cfg(feature = "cuda")]
pub(crate) mod address;
#[cfg(feature = "cuda")]
mod compile;
#[cfg(feature = "cuda")]
mod convolve;
#[cfg(feature = "cudnn")]
mod cudnn;
#[cfg(feature = "cuda")]
mod gpu;
#[cfg(test)]
mod host;
mod launches;
#[cfg(feature = "cuda")]
mod layer;
#[cfg(any(feature = "cuda", test))]
mod norm;
#[cfg(feature = "cuda")]
mod norm_tensors;
#[cfg(test)]
mod norm_tests;
mod operands;
#[cfg(feature = "cuda")]
mod product;
#[cfg(any(feature = "cuda", test))]
mod program;
#[cfg_attr(not(feature = "cuda"), allow(dead_code))] // needed only by NVRTC
mod source;
#[cfg(any(feature = "cuda", test))]
mod table;
#[cfg(feature = "cuda")]
mod tensors;
#[cfg(test)]
mod tests;
#[cfg(feature = "cuda")]
mod upload;

#[cfg(not(feature = "cuda"))]
pub(crate) use absent::*;
#[cfg(feature = "cuda")]
pub(crate) use convolve::convolve;
pub(crate) use launches::{Address, ConvShape, Convolve, Factor, Grid, Launch, Product, Target, supported};
#[cfg(feature = "cuda")]
pub(crate) use layer::{Output, address, address_or_none, launch, storage_address};
#[cfg(feature = "cuda")]
pub(crate) use norm_tensors::*;
pub(crate) use operands::{Assignment, NormOperands, Operands, Rule, Scalars, scalars};
#[cfg(feature = "cuda")]
pub(crate) use product::product;
pub(crate) use source::Kernel;
#[cfg(feature = "cuda")]
pub(crate) use tensors::*;
#[cfg(feature = "cuda")]
pub(crate) use upload::{Pinned, Upload, Uploader};
