//! Kernels for CUDA: what optimizers, clipping and loss scaling do to tensors on GPUs. The `README.md` beside this file
//! tells how they are built, launched and tested.
//!
//! What they do on the CPU is in [`optim`](crate::optim) and [`amp`](crate::amp), with the same arithmetic.
// This room launches kernels. Every block says why it is sound.
#![allow(unsafe_code)]

// Without the feature, the same names refuse politely.
#[cfg(not(feature = "nccl"))]
mod absent;
#[cfg(feature = "nccl")]
mod address;
#[cfg(feature = "nccl")]
mod compile;
#[cfg(feature = "nccl")]
mod gpu;
#[cfg(test)]
mod host;
mod operands;
#[cfg(any(feature = "nccl", test))]
mod program;
#[cfg(any(feature = "nccl", test))]
#[cfg_attr(not(feature = "nccl"), allow(dead_code))] // what only NVRTC needs
mod source;
#[cfg(any(feature = "nccl", test))]
mod table;
#[cfg(feature = "nccl")]
mod tensors;
#[cfg(test)]
mod tests;

#[cfg(not(feature = "nccl"))]
pub(crate) use absent::*;
pub(crate) use operands::{Operands, Rule, Scalars, scalars};
#[cfg(feature = "nccl")]
pub(crate) use tensors::*;
