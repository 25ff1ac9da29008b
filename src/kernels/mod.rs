//! Kernels for CUDA: what optimizers, clipping, loss scaling, norms and DDP's copies do to tensors on GPUs. The `README.md` beside this file
//! tells how they are built, launched and tested.
//!
//! What they do on the CPU is in [`optim`](crate::optim), [`amp`](crate::amp) and [`nn`](crate::nn), with the same arithmetic.
// Kernels are launched here. Every block says why it is sound.
#![allow(unsafe_code)]

// Without the feature, the same names refuse politely.
#[cfg(not(feature = "cuda"))]
mod absent;
#[cfg(feature = "cuda")]
pub(crate) mod address;
#[cfg(feature = "cuda")]
mod compile;
#[cfg(feature = "cuda")]
mod gpu;
#[cfg(test)]
mod host;
#[cfg(any(feature = "cuda", test))]
mod norm;
#[cfg(feature = "cuda")]
mod norm_tensors;
#[cfg(test)]
mod norm_tests;
mod operands;
#[cfg(any(feature = "cuda", test))]
mod program;
#[cfg(any(feature = "cuda", test))]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))] // what only NVRTC needs
mod source;
#[cfg(any(feature = "cuda", test))]
mod table;
#[cfg(feature = "cuda")]
mod tensors;
#[cfg(test)]
mod tests;

#[cfg(not(feature = "cuda"))]
pub(crate) use absent::*;
#[cfg(feature = "cuda")]
pub(crate) use norm_tensors::*;
pub(crate) use operands::{Assignment, NormOperands, Operands, Rule, Scalars, scalars};
#[cfg(feature = "cuda")]
pub(crate) use tensors::*;
