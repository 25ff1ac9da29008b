//! Samplers, orders and loaders that need no process group: against PyTorch, and runs that resume.
#![allow(clippy::unwrap_used)] // a failed test may panic
mod loader;
mod loader_epochs;
mod loader_state;
mod rows;
mod sampler;
