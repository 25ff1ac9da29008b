//! The hashes of the files of a checkpoint.
use super::error::flawed;
use crate::Result;
use crate::state::file::{PartHashes, SafetensorsFile};

/// Files, with the hashes of the parts of their tensors that were read.
#[derive(Debug)]
pub struct Hashes(pub Vec<(SafetensorsFile, Vec<PartHashes>)>);

impl Hashes {
    /// Checks the hashes of the files that have one, all of whose parts were read.
    pub fn check(&self) -> Result<()> {
        self.0.iter().try_for_each(|(file, hashes)| file.check(hashes).map_err(|flaw| flawed(file.path(), flaw)))
    }
}
