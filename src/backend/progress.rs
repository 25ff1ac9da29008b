//! How far the calls of one kind have come, and what the last ones were.
use super::call::Call;
use std::collections::VecDeque;

/// The calls of one work queue: those that were started (and may still be in the queue), and the one being carried out.
#[derive(Default)]
pub(super) struct Progress {
    /// The most recent calls that were started, the newest last.
    calls: VecDeque<Call>,
    /// The sequence number of the newest.
    started: u64,
    /// The sequence number of the call that is being carried out, or of the last one that was.
    current: u64,
    running: bool,
}

impl Progress {
    /// Enough for ranks that are a thousand calls apart.
    const KEPT: usize = 1024;

    /// Notes a call. Sequence numbers have no gaps.
    pub(super) fn start(&mut self, sequence: u64, call: Call) {
        if self.calls.len() == Self::KEPT {
            self.calls.pop_front();
        }
        self.calls.push_back(call);
        self.started = sequence;
    }

    pub(super) fn begin(&mut self, sequence: u64) {
        self.current = sequence;
        self.running = true;
    }

    pub(super) fn finish(&mut self) {
        self.running = false;
    }

    pub(super) fn current(&self) -> u64 {
        self.current
    }

    /// The sequence number of the call that is being carried out.
    pub(super) fn running(&self) -> Option<u64> {
        self.running.then_some(self.current)
    }

    /// What was called at `sequence`, if that is not in the future or long past.
    pub(super) fn call_at(&self, sequence: u64) -> Option<Call> {
        let age = usize::try_from(self.started.checked_sub(sequence)?).ok()?;
        let index = self.calls.len().checked_sub(1)?.checked_sub(age)?;
        self.calls.get(index).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::call::Operation;

    #[test]
    fn the_last_thousand_calls_are_remembered() {
        let call = |sequence| Call { count: sequence, ..Call::bare(Operation::Barrier) };
        let mut progress = Progress::default();
        assert_eq!(progress.call_at(0), None);
        for sequence in 0..5000 {
            progress.start(sequence, call(sequence));
        }
        assert_eq!(progress.call_at(4999), Some(call(4999)));
        assert_eq!(progress.call_at(4999 - 1023), Some(call(4999 - 1023)));
        assert_eq!(progress.call_at(4999 - 1024), None);
        assert_eq!(progress.call_at(5000), None);
    }
}
