//! The one error that the errors of all crates contain.
use crate::text::Printable;
use std::fmt;
use std::path::PathBuf;

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The errors that every crate has. `Display` gives the whole message, which includes the cause; `Debug` puts the variant's name before it.
///
/// In `candle-ddp`, they become the variants of the same names. The enum is exhaustive, so that none is forgotten there.
#[derive(thiserror::Error)]
pub enum Error {
    /// The operating system refused something.
    #[error("{context}: {error}")]
    Io {
        /// The operation and its object.
        context: String,
        /// The system's reason.
        error: std::io::Error,
    },

    /// An invalid argument.
    #[error("{argument}: {}", Printable(reason))]
    InvalidArgument {
        /// The argument's or option's name.
        argument: &'static str,
        /// Why it is invalid, and what would be valid.
        reason: String,
    },

    /// A file or folder of data that cannot be used.
    #[error("{}: {}", path.display(), Printable(reason))]
    DataFile {
        /// The file or folder.
        path: PathBuf,
        /// The fault, and the remedy.
        reason: String,
    },

    /// Something asked for was not compiled in, or does not exist in this version.
    #[error("{what} is not available: {hint}")]
    Unavailable {
        /// The thing that was asked for.
        what: String,
        /// How to get it.
        hint: String,
    },
}

impl Error {
    /// An `Io` with its context.
    pub fn io(context: impl Into<String>, error: impl Into<std::io::Error>) -> Self {
        Self::Io { context: context.into(), error: error.into() }
    }

    /// An `InvalidArgument`.
    pub fn invalid(argument: &'static str, reason: impl Into<String>) -> Self {
        Self::InvalidArgument { argument, reason: reason.into() }
    }

    /// A `DataFile`.
    pub fn data_file(path: impl Into<PathBuf>, reason: impl Into<String>) -> Self {
        Self::DataFile { path: path.into(), reason: reason.into() }
    }

    /// An `Unavailable`.
    pub fn unavailable(what: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Unavailable { what: what.into(), hint: hint.into() }
    }

    /// The variant's name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Io { .. } => "Io",
            Self::InvalidArgument { .. } => "InvalidArgument",
            Self::DataFile { .. } => "DataFile",
            Self::Unavailable { .. } => "Unavailable",
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {self}", self.name())
    }
}
