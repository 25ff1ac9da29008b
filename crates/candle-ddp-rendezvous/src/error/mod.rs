//! The errors of a rendezvous and its stores: what happened, where, why, and what to do.
mod failure;
mod rank_error;
mod text;

pub use failure::Failure;
pub use rank_error::{FILE_VARIABLE, OF_PROGRAM, RankError};
pub use text::{GRADIENTS, others};

use candle_ddp_base::text::Printable;
use candle_ddp_env::Invalid;
use std::fmt;
use std::time::Duration;

/// The result of a rendezvous and its stores.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong while ranks meet, with the data a program needs to react. `Display` gives the whole message,
/// which includes the cause; `Debug` puts the variant's name before it.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An error that every crate has: of the operating system, or an invalid argument. In `candle_ddp::Error`, it becomes the variant of
    /// the same name.
    #[error(transparent)]
    Base(#[from] candle_ddp_base::Error),

    /// A rank outside of its group.
    #[error("rank {rank} is outside of a world of {world_size}: ranks go from 0 to world_size - 1")]
    RankOutOfRange {
        /// The rank that was given.
        rank: usize,
        /// The number of ranks in the group.
        world_size: usize,
    },

    /// A required environment variable is not set.
    #[error("the environment variable {variable} is not set: {hint}")]
    MissingEnvironment {
        /// The variable's name.
        variable: &'static str,
        /// Who sets it, or what to use instead.
        hint: String,
    },

    /// An environment variable has an invalid value.
    #[error("{variable}={value:?}: {reason}")]
    InvalidEnvironment {
        /// The variable's name.
        variable: String,
        /// Its value.
        value: String,
        /// What is wrong with it.
        reason: String,
    },

    /// A store did not answer, or a key was not set in time.
    #[error("{operation} timed out after {timeout:?} on the store {store}: {}", Printable(reason))]
    StoreTimeout {
        /// The operation, with its keys.
        operation: String,
        /// Where the store is.
        store: String,
        /// The time-out.
        timeout: Duration,
        /// What is missing, and what usually causes it.
        reason: String,
    },

    /// Some ranks did not arrive at the rendezvous in time.
    #[error("{operation} timed out after {timeout:?} on the store {store}: {}", Printable(reason))]
    RanksMissing {
        /// What this rank was doing.
        operation: String,
        /// Where the store is.
        store: String,
        /// The time-out.
        timeout: Duration,
        /// The ranks that are missing.
        ranks: Vec<usize>,
        /// What is missing, and what usually causes it.
        reason: String,
    },

    /// A store violated its protocol, or refused a request.
    #[error("{operation} failed on the store {store}: {}", Printable(reason))]
    Store {
        /// The operation, with its keys.
        operation: String,
        /// Where the store is.
        store: String,
        /// The reason.
        reason: String,
    },

    /// The two ends of a connection do not have the same secret, or only one of them has one.
    #[error("{operation} failed on {peer}: {}", Printable(reason))]
    Secret {
        /// The operation.
        operation: String,
        /// The other end.
        peer: String,
        /// Which end lacks the secret, and what to do.
        reason: String,
    },

    /// A group whose ranks could not all be connected to each other.
    #[error("rank {rank} has no connection to {} (time-out {timeout:?}): {}", others(peers), Printable(reason))]
    Connect {
        /// This rank.
        rank: usize,
        /// The ranks that it could not connect to; empty if it is unknown which.
        peers: Vec<usize>,
        /// The time-out of the group's construction.
        timeout: Duration,
        /// Why.
        reason: String,
    },

    /// The caller cancelled the wait with this error. See [`Store::wait_cancellable`](crate::Store::wait_cancellable).
    #[error(transparent)]
    Cancelled(Box<dyn std::error::Error + Send + Sync>),

    /// A rank failed or died while the ranks met.
    #[error(transparent)]
    Group(#[from] Failure),
}

#[doc(hidden)]
impl From<Invalid> for Error {
    fn from(Invalid { variable, value, reason }: Invalid) -> Self {
        Self::InvalidEnvironment { variable: variable.to_string(), value, reason }
    }
}

impl Error {
    /// The failure of a group in this error, if there is one.
    pub fn failure(&self) -> Option<&Failure> {
        match self {
            Self::Group(failure) => Some(failure),
            _ => None,
        }
    }
}

#[doc(hidden)]
impl Error {
    /// An `Io` with its context.
    pub fn io(context: impl Into<String>, error: impl Into<std::io::Error>) -> Self {
        candle_ddp_base::Error::io(context, error).into()
    }

    pub fn invalid(argument: &'static str, reason: impl Into<String>) -> Self {
        candle_ddp_base::Error::invalid(argument, reason).into()
    }

    /// The rank that caused this error, as numbered in the group.
    pub fn culprit(&self) -> Option<usize> {
        match self {
            Self::Group(failure) => failure.culprit(),
            Self::RanksMissing { ranks, .. } | Self::Connect { peers: ranks, .. } => ranks.first().copied(),
            _ => None,
        }
    }

    /// The variant's name; for an error that every crate has and for the failure of a group, the name of that.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Base(error) => error.name(),
            Self::RankOutOfRange { .. } => "RankOutOfRange",
            Self::MissingEnvironment { .. } => "MissingEnvironment",
            Self::InvalidEnvironment { .. } => "InvalidEnvironment",
            Self::StoreTimeout { .. } => "StoreTimeout",
            Self::RanksMissing { .. } => "RanksMissing",
            Self::Store { .. } => "Store",
            Self::Secret { .. } => "Secret",
            Self::Connect { .. } => "Connect",
            Self::Cancelled(_) => "Cancelled",
            Self::Group(failure) => failure.name(),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {self}", self.name())
    }
}
