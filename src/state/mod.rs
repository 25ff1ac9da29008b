//! What is saved and loaded: files that are there as a whole or not at all, and dicts of named tensors.
pub(crate) mod file;
mod state_dict;
mod values;

pub use state_dict::StateDict;
pub(crate) use state_dict::*;
pub use values::Json;
