//! What only the log tells. The log is the process's, so one test runs at a time.
#![allow(clippy::unwrap_used)] // a failed test may panic
#[path = "../common/mod.rs"]
mod common;
mod engine;
#[path = "../common/logger.rs"]
mod logger;
mod lost_gradients;
mod shm_fallback;
mod unused;
