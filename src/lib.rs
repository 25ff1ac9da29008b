//! Distributed data-parallel training for candle.
#![allow(missing_docs)]
pub mod backend;
pub mod data;
pub mod error;
#[cfg(feature = "launcher")]
pub mod launch;
pub mod rendezvous;

pub use backend::{ReduceOp, Work};
pub use error::{Error, Result};
