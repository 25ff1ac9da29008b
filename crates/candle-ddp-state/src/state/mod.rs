//! Saving and loading: dicts of named tensors, and files that appear complete or not at all.
pub mod file;
mod fingerprint;
mod loader;
mod parts;
mod per_rank;
mod pieces;
mod share;
mod state_dict;
mod values;

pub use fingerprint::{FileHash, fingerprint, non_finite, summary};
pub use loader::Loader;
pub use parts::Parts;
pub use per_rank::{PerRank, RankZero};
pub use pieces::PART_OF;
pub use share::{Share, insert_needed};
pub use state_dict::StateDict;
pub use state_dict::*;
pub use values::Serde;
