//! The recent calls of one channel, and how far they have come.
use super::report::ProgressReport;
use crate::backend::call::Call;
use std::collections::VecDeque;

/// The calls of one channel: those that were started (and may still be queued), and the one being carried out.
#[derive(Default)]
pub(crate) struct CallHistory {
    /// The most recent calls that were started, the newest last.
    calls: VecDeque<Call>,
    /// The sequence number of the newest.
    started: u64,
    /// The sequence number of the call that is being carried out, or of the last one that was.
    begun: u64,
    running: bool,
}

impl CallHistory {
    /// Enough for ranks that are a thousand calls apart.
    const KEPT: usize = 1024;

    /// Notes a call. Sequence numbers have no gaps.
    pub(crate) fn start(&mut self, sequence: u64, call: Call) {
        if self.calls.len() == Self::KEPT {
            self.calls.pop_front();
        }
        self.calls.push_back(call);
        self.started = sequence;
    }

    /// Notes that a call is now being carried out.
    pub(crate) fn begin(&mut self, sequence: u64) {
        self.begun = sequence;
        self.running = true;
    }

    /// Notes that the call that [began](Self::begin) is over.
    pub(crate) fn finish(&mut self) {
        self.running = false;
    }

    /// The sequence number of the last call that was begun; 0 before the first.
    pub(crate) fn begun(&self) -> u64 {
        self.begun
    }

    /// The sequence number of the call that is being carried out.
    pub(crate) fn running(&self) -> Option<u64> {
        self.running.then_some(self.begun)
    }

    /// What was called at `sequence`; `None` if that is in the future or no longer remembered.
    pub(crate) fn call_at(&self, sequence: u64) -> Option<Call> {
        let age = usize::try_from(self.started.checked_sub(sequence)?).ok()?;
        let index = self.calls.len().checked_sub(1)?.checked_sub(age)?;
        self.calls.get(index).copied()
    }

    /// What other ranks are told.
    pub(crate) fn report(&self, waits_for_lock: bool) -> ProgressReport {
        let calls = self.calls.iter().copied().collect();
        ProgressReport { started: self.started, begun: self.begun, calls, waits_for_lock }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::call::Operation;

    #[test]
    fn the_last_thousand_calls_are_remembered() {
        let call = |sequence| Call { count: sequence, ..Call::bare(Operation::Barrier) };
        let mut history = CallHistory::default();
        assert_eq!(history.call_at(0), None);
        assert_eq!(history.report(false), ProgressReport::default());
        for sequence in 0..5000 {
            history.start(sequence, call(sequence));
        }
        history.begin(4998);
        let report = history.report(true);
        assert_eq!((report.started, report.begun, report.waits_for_lock), (4999, 4998, true));
        let expected = [(4999, Some(4999)), (4999 - 1023, Some(4999 - 1023)), (4999 - 1024, None), (5000, None)];
        for (sequence, count) in expected {
            assert_eq!(history.call_at(sequence), count.map(call), "{sequence}");
            assert_eq!(report.call_at(sequence), count.map(call), "{sequence}, reported");
        }
    }
}
