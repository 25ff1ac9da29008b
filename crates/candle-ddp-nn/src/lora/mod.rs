//! LoRA: adapters of low rank on layers whose weights are frozen.
//!
//! Layers know `adapter` alone. A model that `build` makes gets stand-ins for the weights of adapted layers from `backend`.
pub(crate) mod adapter;
mod backend;
mod build;
mod config;
mod keep;
mod merge;
mod names;

pub use config::{LoraBias, LoraConfig};
pub use keep::keeping_frozen;
