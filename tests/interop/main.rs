//! Interoperability with PyTorch, in the interpreter named by CANDLE_DDP_PYTHON (default: python3). Skipped with a
//! message if that has no PyTorch.
#![allow(clippy::unwrap_used)] // a failed test may panic
mod checkpoint;
mod checkpointer;
#[path = "../common/mod.rs"]
mod common;
mod launch;
mod pytorch;
mod store;
mod torchfrtrace;
mod writer;
