use crate::error::Failure;
use crate::{Error, Result};
use std::sync::{Mutex, PoisonError};

/// A shared cancellation signal: ends all waits that use it, with a single reason.
#[derive(Default)]
pub(crate) struct Cancellation(Mutex<Option<Reason>>);

#[derive(Clone)]
pub(crate) enum Reason {
    PeerFailed {
        peer: usize,
        reason: String,
    },
    StoreLost {
        operation: String,
        store: String,
        reason: String,
    },
    /// Other ranks meet in another place.
    Superseded {
        key: String,
    },
}

impl Cancellation {
    /// Cancels with `reason`, unless already cancelled.
    pub(crate) fn cancel(&self, reason: Reason) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(reason);
    }

    /// Returns the reason as an error if this was cancelled.
    pub(crate) fn check(&self) -> Result<()> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone().map_or(Ok(()), |reason| Err(reason.into()))
    }
}

impl From<Reason> for Error {
    fn from(reason: Reason) -> Self {
        match reason {
            Reason::PeerFailed { peer, reason } => Failure::PeerFailed { peer, reason }.into(),
            Reason::StoreLost { operation, store, reason } => Self::Store { operation, store, reason },
            Reason::Superseded { key } => Self::Store {
                operation: "meeting the other ranks".to_string(),
                store: "of the run".to_string(),
                reason: format!("the ranks of another generation meet instead ({key})"),
            },
        }
    }
}
