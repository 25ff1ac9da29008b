//! A GPU that is not there: CUDA's driver, cuBLAS, cuRAND and NCCL, carried out by the CPU. See README.md.
//!
//! The library is preloaded, so that its functions come before those of the real libraries with the same names.
mod blas;
mod driver;
mod memory;
mod module;
mod nccl;
mod ptx;
mod random;
mod stream;
