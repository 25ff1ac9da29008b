//! The errors of images and datasets.
use crate::Error;
use std::io;
use std::path::Path;

/// The error of reading `path`.
pub(crate) fn reading(path: &Path, error: io::Error) -> Error {
    candle_ddp_base::Error::io(format!("reading {}", path.display()), error).into()
}

/// The error of reading the folder `path`.
pub(crate) fn reading_folder(path: &Path, error: io::Error) -> Error {
    candle_ddp_base::Error::io(format!("reading the folder {}", path.display()), error).into()
}

/// The error of a file or folder of a dataset that cannot be used: the fault, and the remedy.
pub(crate) fn data_file(path: &Path, reason: impl Into<String>) -> Error {
    candle_ddp_base::Error::data_file(path, reason).into()
}
