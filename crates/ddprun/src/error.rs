//! The launcher's own errors. Workers report theirs themselves.
use std::io::ErrorKind;

/// The launcher's result.
pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;

/// The command line makes no sense.
pub(crate) const USAGE: u8 = 2;
/// The program exists but cannot be run; the same code as in shells.
const NOT_EXECUTABLE: u8 = 126;
/// The program does not exist; the same code as in shells.
const NOT_FOUND: u8 = 127;

/// Why the launcher failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// An option, or its environment variable, is invalid: why, and what would be valid.
    #[error("{option}: {reason}")]
    Usage { option: &'static str, reason: String },

    /// The program cannot be started.
    #[error("cannot start {program}: {error}. {hint}")]
    Program { program: String, error: std::io::Error, hint: String },

    /// cargo built a target without naming its file.
    #[error("cargo built the {kind} {name} but did not say where it is")]
    NoExecutable { kind: &'static str, name: String },

    /// This machine should not take part in a run (`--check`).
    #[error("--check: this machine does not join the run: {0}")]
    Unfit(String),

    /// The system refused something, or the store, or a trace cannot be read.
    #[error(transparent)]
    Library(candle_ddp_rendezvous::Error),
}

impl From<candle_ddp_rendezvous::Error> for Error {
    fn from(error: candle_ddp_rendezvous::Error) -> Self {
        match error {
            candle_ddp_rendezvous::Error::Base(candle_ddp_base::Error::InvalidArgument { argument, reason }) => {
                Self::usage(argument, reason)
            }
            error => Self::Library(error),
        }
    }
}

impl From<candle_ddp_base::Error> for Error {
    fn from(error: candle_ddp_base::Error) -> Self {
        candle_ddp_rendezvous::Error::from(error).into()
    }
}

/// Refuses an option, or its environment variable.
pub(crate) fn refuse<T>(option: &'static str, reason: impl Into<String>) -> Result<T> {
    Err(Error::usage(option, reason))
}

impl Error {
    pub(crate) fn usage(option: &'static str, reason: impl Into<String>) -> Self {
        Self::Usage { option, reason: reason.into() }
    }

    pub(crate) fn io(context: impl Into<String>, error: impl Into<std::io::Error>) -> Self {
        candle_ddp_base::Error::io(context, error).into()
    }

    /// The launcher's exit code.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Usage { .. } => USAGE,
            Self::Program { error, .. } if error.kind() == ErrorKind::NotFound => NOT_FOUND,
            Self::Program { .. } => NOT_EXECUTABLE,
            Self::NoExecutable { .. } | Self::Unfit(_) | Self::Library(_) => 1,
        }
    }
}
