//! Together with PyTorch, for the interpreter named by CANDLE_DDP_PYTHON (python3 when unset). Skipped, with a message, without.
#![allow(clippy::unwrap_used)] // a failed test may panic
mod checkpoint;
mod launch;
#[path = "../common/pytorch.rs"]
mod pytorch;
mod store;
