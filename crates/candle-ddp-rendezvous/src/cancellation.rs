use crate::error::Failure;
use crate::{Error, Result};
use candle_ddp_base::panic::lock;
use std::sync::Mutex;

/// A shared cancellation signal: ends all waits that use it, with a single reason.
#[derive(Debug, Default)]
pub struct Cancellation(Mutex<Option<Reason>>);

/// Why a wait was cancelled.
#[derive(Clone, Debug)]
pub enum Reason {
    /// A rank failed.
    Failed(Failure),
    /// The store no longer answers.
    StoreLost {
        /// The operation that failed.
        operation: String,
        /// Where the store is.
        store: String,
        /// Why it was lost.
        reason: String,
    },
    /// The other ranks meet elsewhere.
    Superseded {
        /// The key that announces it.
        key: String,
    },
}

impl Cancellation {
    /// Cancels with `reason`, unless already cancelled.
    pub fn cancel(&self, reason: Reason) {
        lock(&self.0).get_or_insert(reason);
    }

    /// Returns the reason as an error if this was cancelled.
    pub fn check(&self) -> Result<()> {
        lock(&self.0).clone().map_or(Ok(()), |reason| Err(reason.into_error()))
    }
}

impl Reason {
    fn into_error(self) -> Error {
        match self {
            Self::Failed(failure) => failure.into(),
            Self::StoreLost { operation, store, reason } => Error::Store { operation, store, reason },
            Self::Superseded { key } => Error::Store {
                operation: "meeting the other ranks".to_string(),
                store: "of the run".to_string(),
                reason: format!("the ranks of another generation meet instead ({key})"),
            },
        }
    }
}
