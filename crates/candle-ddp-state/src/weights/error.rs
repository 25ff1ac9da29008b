//! Errors of files.
use crate::Error;
use crate::state::file::Flaw;
use std::path::Path;

/// The error for a file that cannot be read.
pub fn unreadable(path: &Path, reason: impl Into<String>) -> Error {
    Error::CheckpointFile { path: path.to_path_buf(), reason: reason.into() }
}

pub(super) fn flawed(path: &Path, flaw: Flaw) -> Error {
    unreadable(path, format!("it is {flaw}"))
}
