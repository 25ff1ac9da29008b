//! Files of weights, of this crate and of PyTorch, and the states of generators.
#![allow(clippy::unwrap_used)] // a failed test may panic
mod files;
mod generator;
mod pickles;
mod pretrained;
