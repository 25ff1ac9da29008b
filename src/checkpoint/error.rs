use crate::Error;
use std::path::Path;

pub(super) fn unreadable(path: &Path, reason: impl Into<String>) -> Error {
    Error::CheckpointFile { path: path.to_path_buf(), reason: reason.into() }
}
