//! What is saved and loaded: files that are there as a whole or not at all, and dicts of named tensors.
pub(crate) mod file;
mod fingerprint;
mod per_rank;
mod state_dict;
mod values;

pub(crate) use fingerprint::{fingerprint, summary};
pub use per_rank::{PerRank, RankZero};
pub use state_dict::StateDict;
pub(crate) use state_dict::*;
pub use values::Serde;
