//! Samplers, orders and loaders: against PyTorch, with ranks that are threads, and runs that resume.
#![allow(clippy::unwrap_used)] // a failed test may panic
mod loader;
mod loader_epochs;
mod loader_state;
mod orders;
mod ranks;
mod rows;
mod sampler;
mod tar_shards;
#[cfg(feature = "vision")]
mod vision_errors;
