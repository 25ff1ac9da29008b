//! The recent calls of one channel and their progress.
use super::report::ProgressReport;
use crate::call::{Call, Channel};
use crate::call_site::CallSite;
use crate::flight_recorder::{CallRecord, CallState, ChannelKind, now_ns};
use crate::standing::current;
use candle_ddp_base::activity::Activity;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The calls of one channel: those that were started (and may still be queued), and the one that is running.
#[derive(Debug, Default)]
pub(crate) struct CallHistory {
    /// The most recently started calls, the newest last.
    calls: VecDeque<Entry>,
    /// The sequence number of the newest call.
    started: u64,
    /// The sequence number of the running call, or of the last one that ran.
    begun: u64,
    running: bool,
    /// The thread that runs, or ran, the last call that began, and where the program waits for that.
    runner: (u64, CallSite),
    /// The thread that started the last call.
    caller: Arc<Activity>,
    /// The number of calls that the flight recorder wants, with their times; 0 without it.
    recorded: usize,
}

/// A call. Its times come from the clock that the engines read for deadlines and spans, so that one reading serves all.
#[derive(Clone, Copy, Debug)]
struct Entry {
    call: Call,
    state: CallState,
    scheduled: Option<Instant>,
    started: Option<Instant>,
    completed: Option<Instant>,
    /// How long the call waited for the last of the other ranks.
    waited: Option<Duration>,
}

impl CallHistory {
    /// Enough for ranks that are a thousand calls apart.
    const KEPT: usize = 1024;

    /// Returns a history that remembers `recorded` calls, with their times, for the flight recorder.
    pub(crate) fn new(recorded: usize) -> Self {
        Self { recorded, ..Self::default() }
    }

    /// `at` or, if the flight recorder wants it, the present time.
    fn time(&self, at: Option<Instant>) -> Option<Instant> {
        at.or_else(|| (self.recorded > 0).then(Instant::now))
    }

    /// Records a call; the time, here and below, if the engine has read the clock. Sequence numbers have no gaps.
    pub(crate) fn start(&mut self, sequence: u64, call: Call, at: Option<Instant>) {
        if self.calls.len() >= Self::KEPT.max(self.recorded) {
            self.calls.pop_front();
        }
        let scheduled = self.time(at);
        self.calls.push_back(Entry {
            call,
            state: CallState::Scheduled,
            scheduled,
            started: None,
            completed: None,
            waited: None,
        });
        self.started = sequence;
        self.caller = Activity::current();
    }

    /// Records that a call is now running.
    pub(crate) fn begin(&mut self, sequence: u64, at: Option<Instant>) {
        let started = self.time(at);
        self.begun = sequence;
        self.running = true;
        self.runner = (current(), CallSite::outermost());
        if let Some(entry) = self.entry_mut(sequence) {
            (entry.state, entry.started) = (CallState::Started, started);
        }
    }

    /// Records that the call that [began](Self::begin) is complete, and whether it succeeded.
    pub(crate) fn finish(&mut self, well: bool, at: Option<Instant>) {
        self.running = false;
        self.complete(self.begun, well, at);
    }

    /// Records how long the running call has waited for the last of the other ranks.
    pub(crate) fn note_wait(&mut self, waited: Duration) {
        if let Some(entry) = self.entry_mut(self.begun) {
            entry.waited = Some(waited);
        }
    }

    /// Records that a call is complete; several calls may run at once.
    pub(crate) fn complete(&mut self, sequence: u64, well: bool, at: Option<Instant>) {
        let completed = self.time(at);
        if let Some(entry) = self.entry_mut(sequence) {
            (entry.state, entry.completed) = (if well { CallState::Completed } else { CallState::Failed }, completed);
        }
    }

    /// The sequence number of the last call that was started; 0 before the first.
    pub(crate) fn started(&self) -> u64 {
        self.started
    }

    /// The sequence number of the last call that was begun; 0 before the first.
    pub(crate) fn begun(&self) -> u64 {
        self.begun
    }

    /// The thread that runs the last call that was begun, and where the program waits for that if it is one of its threads.
    pub(crate) fn runner(&self) -> (u64, CallSite) {
        self.runner
    }

    /// The sequence number of the running call.
    pub(crate) fn running(&self) -> Option<u64> {
        self.running.then_some(self.begun)
    }

    fn index(&self, sequence: u64) -> Option<usize> {
        let age = usize::try_from(self.started.checked_sub(sequence)?).ok()?;
        self.calls.len().checked_sub(1)?.checked_sub(age)
    }

    fn entry_mut(&mut self, sequence: u64) -> Option<&mut Entry> {
        let index = self.index(sequence)?;
        self.calls.get_mut(index)
    }

    /// The call at `sequence`; `None` if that is in the future or no longer remembered.
    pub(crate) fn call_at(&self, sequence: u64) -> Option<Call> {
        self.calls.get(self.index(sequence)?).map(|entry| entry.call)
    }

    /// Whether one of the remembered calls came from `place`.
    pub(crate) fn has_called_from(&self, place: CallSite) -> bool {
        self.calls.iter().any(|entry| entry.call.place == place)
    }

    /// The report for other ranks.
    pub(crate) fn report(&self, waits_for_lock: bool) -> ProgressReport {
        let calls = self.calls.iter().skip(self.calls.len().saturating_sub(Self::KEPT));
        let calls = calls.map(|entry| entry.call).collect();
        let activity = self.caller.text();
        ProgressReport { started: self.started, begun: self.begun, calls, waits_for_lock, activity }
    }

    /// Returns the calls that the flight recorder writes. The call that connects a group has the number 0, and is left
    /// out.
    pub(crate) fn records(&self, channel: Channel) -> impl Iterator<Item = CallRecord> {
        let (kind, peer) = match channel {
            Channel::Collectives => (ChannelKind::Collectives, None),
            Channel::SendTo(peer) => (ChannelKind::Send, Some(peer)),
            Channel::RecvFrom(peer) => (ChannelKind::Recv, Some(peer)),
        };
        let first = (self.started + 1).saturating_sub(self.calls.len() as u64);
        let recorded = self.calls.len().saturating_sub(self.recorded);
        let calls = self.calls.iter().zip(first..).skip(recorded).filter(|(_, sequence)| *sequence > 0);
        let (now, now_ns) = (Instant::now(), now_ns());
        let since_1970 = move |at: Instant| now_ns.saturating_sub(now.saturating_duration_since(at).as_nanos() as u64);
        calls.map(move |(entry, sequence)| {
            let Entry { call, state, scheduled, started, completed, waited } = *entry;
            CallRecord {
                channel: kind,
                sequence,
                operation: call.operation.name().to_string(),
                dtype: call.element.map(|element| element.name().to_string()),
                count: call.count,
                reduction: call.reduction.map(|reduction| reduction.to_string()),
                root: call.root,
                peer,
                label: call.label.text(),
                shape: call.shape.text(),
                place: call.place.text(),
                state,
                scheduled_ns: scheduled.map_or(0, since_1970),
                started_ns: started.map(since_1970),
                completed_ns: completed.map(since_1970),
                waited_ns: waited.map(|waited| waited.as_nanos() as u64),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operation::Operation;

    #[test]
    fn the_last_thousand_calls_are_remembered() {
        let call = |sequence| Call { count: sequence, ..Call::bare(Operation::Barrier) };
        let mut history = CallHistory::default();
        assert_eq!(history.call_at(0), None);
        assert_eq!(history.report(false), ProgressReport::default());
        for sequence in 0..5000 {
            history.start(sequence, call(sequence), None);
        }
        history.begin(4998, None);
        let report = history.report(true);
        assert_eq!((report.started, report.begun, report.waits_for_lock), (4999, 4998, true));
        let expected = [(4999, Some(4999)), (4999 - 1023, Some(4999 - 1023)), (4999 - 1024, None), (5000, None)];
        for (sequence, count) in expected {
            assert_eq!(history.call_at(sequence), count.map(call), "{sequence}");
            assert_eq!(report.call_at(sequence), count.map(call), "{sequence}, reported");
        }
    }

    #[test]
    fn the_flight_recorder_gets_the_last_calls_with_their_times() {
        let mut history = CallHistory::new(2);
        for sequence in 0..4 {
            history.start(sequence, Call::bare(Operation::Barrier), None);
        }
        let begun = Instant::now();
        history.begin(2, Some(begun));
        history.finish(true, Some(begun + Duration::from_nanos(7)));
        history.begin(3, None);
        let states = |history: &CallHistory| {
            history.records(Channel::RecvFrom(5)).map(|call| (call.sequence, call.state)).collect::<Vec<_>>()
        };
        assert_eq!(states(&history), [(2, CallState::Completed), (3, CallState::Started)]);
        let calls: Vec<CallRecord> = history.records(Channel::RecvFrom(5)).collect();
        // The times that the engine has read, and one that was read for the recorder.
        assert_eq!(calls[0].completed_ns, calls[0].started_ns.map(|begun| begun + 7));
        let (scheduled, now) = (calls[0].scheduled_ns, now_ns());
        assert!(calls[0].started_ns.is_some_and(|begun| begun >= scheduled), "{calls:?}");
        assert!((1..60_000_000_000).contains(&(now - scheduled + 1)), "{scheduled} is not just before {now}");
        assert_eq!((calls[1].completed_ns, calls[1].peer, calls[1].channel), (None, Some(5), ChannelKind::Recv));
        history.complete(3, false, None);
        assert_eq!(states(&history)[1], (3, CallState::Failed));
        // Without a recorder, no clock is read, and nothing is written.
        let mut history = CallHistory::default();
        history.start(1, Call::bare(Operation::Barrier), None);
        assert_eq!((history.calls[0].scheduled, history.records(Channel::Collectives).count()), (None, 0));
    }
}
