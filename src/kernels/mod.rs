//! Kernels for CUDA: what optimizers, clipping, loss scaling, norms and DDP's copies do to tensors on GPUs. The `README.md` beside this file
//! tells how they are built, launched and tested.
//!
//! What they do on the CPU is in [`optim`](crate::optim), [`amp`](crate::amp) and [`nn`](crate::nn), with the same arithmetic.
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
#[cfg(any(feature = "nccl", test))]
mod norm;
#[cfg(feature = "nccl")]
mod norm_tensors;
#[cfg(test)]
mod norm_tests;
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
#[cfg(feature = "nccl")]
pub(crate) use norm_tensors::*;
pub(crate) use operands::{Assignment, NormOperands, Operands, Rule, Scalars, scalars};
#[cfg(feature = "nccl")]
pub(crate) use tensors::*;
