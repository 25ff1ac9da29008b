//! The errors of shards and caches.
use candle_ddp_rendezvous::error::Printable;
use std::io;
use std::path::PathBuf;

/// The crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The reason why a shard or a cache cannot be used. In `candle-ddp`, it becomes the variant of the same name.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused something.
    #[error("{context}: {error}")]
    Io {
        /// The operation that failed, and its object.
        context: String,
        /// The system's reason.
        error: io::Error,
    },

    /// An invalid argument.
    #[error("{argument}: {}", Printable(reason))]
    InvalidArgument {
        /// The argument's or option's name.
        argument: &'static str,
        /// The reason why it is invalid, and the valid values.
        reason: String,
    },

    /// A shard or an index that cannot be used.
    #[error("{}: {}", path.display(), Printable(reason))]
    DataFile {
        /// The file.
        path: PathBuf,
        /// The fault, and the remedy.
        reason: String,
    },
}

impl Error {
    /// An `Io` with its context.
    pub(crate) fn io(context: impl Into<String>, error: io::Error) -> Self {
        Self::Io { context: context.into(), error }
    }

    pub(crate) fn invalid(argument: &'static str, reason: impl Into<String>) -> Self {
        Self::InvalidArgument { argument, reason: reason.into() }
    }
}
