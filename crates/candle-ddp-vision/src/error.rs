//! The errors of images, datasets, transforms and models.
use candle_ddp_tensor as tensor;
use std::io;
use std::path::{Path, PathBuf};

/// The crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The reason why an image, a dataset, a transform or a model cannot be used.
///
/// Transforms and [`Collate`](tensor::collate::Collate) return candle's errors, and this one travels in them unchanged: `From`
/// gives it back. In `candle-ddp`, it becomes the variant of the same name.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// candle refused an operation.
    #[error(transparent)]
    Candle(candle_core::Error),

    /// The operating system refused something.
    #[error("{context}: {error}")]
    Io {
        /// The operation that failed, and its object.
        context: String,
        /// The system's reason.
        error: io::Error,
    },

    /// An invalid argument.
    #[error("{argument}: {reason}")]
    InvalidArgument {
        /// The argument's or option's name.
        argument: &'static str,
        /// The reason why it is invalid, and the valid values.
        reason: String,
    },

    /// A file or folder of a dataset that cannot be used.
    #[error("{}: {reason}", path.display())]
    DataFile {
        /// The file or folder.
        path: PathBuf,
        /// The fault, and the remedy.
        reason: String,
    },
}

impl Error {
    /// An `Io` of reading `path`.
    pub(crate) fn reading(path: &Path, error: io::Error) -> Self {
        Self::Io { context: format!("reading {}", path.display()), error }
    }

    /// An `Io` of reading the folder `path`.
    pub(crate) fn reading_folder(path: &Path, error: io::Error) -> Self {
        Self::Io { context: format!("reading the folder {}", path.display()), error }
    }

    pub(crate) fn invalid(argument: &'static str, reason: impl Into<String>) -> Self {
        Self::InvalidArgument { argument, reason: reason.into() }
    }

    /// A `DataFile`.
    pub(crate) fn data_file(path: &Path, reason: impl Into<String>) -> Self {
        Self::DataFile { path: path.to_path_buf(), reason: reason.into() }
    }
}

impl From<tensor::Error> for Error {
    fn from(error: tensor::Error) -> Self {
        match error {
            tensor::Error::InvalidArgument { argument, reason } => Self::InvalidArgument { argument, reason },
            tensor::Error::Candle(error) => error.into(),
            error => Self::Candle(error.into()),
        }
    }
}

/// An error of this crate that went through candle's `Result` comes out unchanged.
impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        let candle_core::Error::Io(error) = error else { return Self::Candle(error) };
        match error.downcast::<Self>().or_else(|error| error.downcast::<tensor::Error>().map(Self::from)) {
            Ok(error) => error,
            Err(error) => Self::Candle(candle_core::Error::Io(error)),
        }
    }
}

/// So that transforms, which return candle's `Result`, can use `?` on ours. It travels as an `io::Error` of kind `Other`: that
/// shows its text and gives it back, where candle's own `Wrapped` keeps the text only.
impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            error => candle_core::Error::Io(io::Error::other(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_come_out_of_candles_as_what_they_were() {
        let travelled = |error: candle_core::Error| Error::from(error);
        let error = travelled(Error::data_file(Path::new("1.jpg"), "it is a FIFO").into());
        assert!(matches!(&error, Error::DataFile { .. }) && error.to_string() == "1.jpg: it is a FIFO", "{error:?}");
        let error = travelled(tensor::Error::InvalidArgument { argument: "size", reason: "0".to_string() }.into());
        assert!(matches!(&error, Error::InvalidArgument { argument: "size", .. }), "{error:?}");
        let error = travelled(io::Error::other("no such disk").into());
        assert!(matches!(&error, Error::Candle(candle_core::Error::Io(_))), "{error:?}");
    }
}
