//! Conversions from and to the errors of other crates.
use super::Error;
use crate::{rendezvous, tensor};
use candle_ddp_env::Invalid;

impl From<candle_ddp_base::Error> for Error {
    fn from(error: candle_ddp_base::Error) -> Self {
        match error {
            candle_ddp_base::Error::Io { context, error } => Self::Io { context, error },
            candle_ddp_base::Error::InvalidArgument { argument, reason } => Self::InvalidArgument { argument, reason },
            candle_ddp_base::Error::DataFile { path, reason } => Self::DataFile { path, reason },
            candle_ddp_base::Error::Unavailable { what, hint } => Self::Unavailable { what, hint },
        }
    }
}

impl From<rendezvous::Error> for Error {
    fn from(error: rendezvous::Error) -> Self {
        match error {
            rendezvous::Error::Base(error) => error.into(),
            rendezvous::Error::RankOutOfRange { rank, world_size } => Self::RankOutOfRange { rank, world_size },
            rendezvous::Error::Connect { rank, peers, timeout, reason } => {
                Self::Connect { rank, peers, timeout, reason }
            }
            rendezvous::Error::Group(failure) => Self::Group(failure),
            rendezvous::Error::Cancelled(error) => match error.downcast() {
                Ok(error) => *error,
                Err(error) => Self::Rendezvous(rendezvous::Error::Cancelled(error)),
            },
            error => Self::Rendezvous(error),
        }
    }
}

#[doc(hidden)]
impl From<Invalid> for Error {
    fn from(error: Invalid) -> Self {
        rendezvous::Error::from(error).into()
    }
}

/// For waits in a store that are cancelled.
impl From<Error> for rendezvous::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Rendezvous(error) => error,
            Error::Group(failure) => Self::Group(failure),
            error => Self::Cancelled(Box::new(error)),
        }
    }
}

impl From<tensor::Error> for Error {
    fn from(error: tensor::Error) -> Self {
        match error {
            tensor::Error::Base(error) => error.into(),
            tensor::Error::UnsupportedDType { operation, dtype, supported } => {
                Self::UnsupportedDType { operation, dtype, supported }
            }
            tensor::Error::Kernel { file, operation, reason } => Self::Kernel { file, operation, reason },
            tensor::Error::Candle(error) => error.into(),
            error => Self::Candle(error.into()),
        }
    }
}

/// Recovers an error of this crate that passed through candle's `Result`.
impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        let error = match error {
            candle_core::Error::Io(error) => match error.downcast() {
                Ok(error) => return error,
                Err(error) => candle_core::Error::Io(error),
            },
            error => error,
        };
        match tensor::Error::from(error) {
            tensor::Error::Candle(error) => Self::Candle(error),
            error => error.into(),
        }
    }
}

/// Lets model code, which uses candle's `Result`, apply `?` to this crate's. The error travels as an `io::Error` of
/// kind `Other`, which shows its text and can be unwrapped again, whereas candle's own `Wrapped` keeps only the text.
impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            error => candle_core::Error::Io(std::io::Error::other(error)),
        }
    }
}
