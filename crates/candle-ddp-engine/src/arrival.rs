//! When the last of the other ranks came to a call.
use std::cell::Cell;
use std::time::Instant;

/// When the last of the other ranks came to a running call, if this rank has had to wait for it. A rank has come when the first of
/// its data is here; later waits are for the transport.
///
/// Between hosts of several ranks, a rank hears only of those with which it exchanges data, and of others by their delay.
#[derive(Debug, Default)]
pub(crate) struct Arrival(Cell<Option<Instant>>);

impl Arrival {
    /// Records that the first data of a rank has come: `None` if it was there already.
    #[inline]
    pub(crate) fn note(&self, came: Option<Instant>) {
        self.0.set(came.max(self.0.get()));
    }

    /// When the last one came; `None` if all were there before.
    pub(crate) fn last(&self) -> Option<Instant> {
        self.0.get()
    }
}
