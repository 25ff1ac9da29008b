//! What ranks tell each other of their progress.
use crate::backend::call::Call;
use std::collections::BTreeMap;

/// How far one rank has come, for the others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ProgressReport {
    /// The last collective that was started; 0 before the first.
    pub(super) started: u64,
    /// The last collective that is over.
    pub(super) finished: u64,
    /// The last collectives up to `started`, as far back as they are remembered.
    pub(super) calls: Vec<Call>,
}

impl ProgressReport {
    /// What was called at `sequence`, if it is remembered.
    pub(super) fn call_at(&self, sequence: u64) -> Option<Call> {
        let age = usize::try_from(self.started.checked_sub(sequence)?).ok()?;
        self.calls.get(self.calls.len().checked_sub(1)?.checked_sub(age)?).copied()
    }
}

/// What a rank that leaves has done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ShutdownNotice {
    /// Its last collective.
    pub(super) last: u64,
    /// Its last messages, by peer.
    pub(super) messages: BTreeMap<usize, Messages>,
}

/// The numbers of a rank's last messages to and from one peer; 0 for none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Messages {
    pub(super) sent: u64,
    pub(super) received: u64,
}
