//! CUDA kernels for optimizers, clipping, loss scaling, norms and DDP's copies. `README.md` in this folder describes
//! how they are built, launched and tested.
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
#[cfg_attr(not(feature = "cuda"), allow(dead_code))] // needed only by NVRTC
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
