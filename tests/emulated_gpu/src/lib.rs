//! An emulated GPU: CUDA's driver, cuBLAS, cuDNN, cuRAND and NCCL, implemented on the CPU. See README.md.
//!
//! The library is preloaded, so that its functions take precedence over those of the real libraries. Their safety requirements
//! are those of the real functions.
#![allow(clippy::missing_safety_doc)]
mod blas;
mod blas_lt;
mod count;
mod cudnn;
mod driver;
mod memory;
mod module;
mod nccl;
mod object;
mod pool;
mod ptx;
mod random;
mod stream;
