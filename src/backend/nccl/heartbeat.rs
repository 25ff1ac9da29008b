//! The thread that keeps in touch with the other ranks through the store: it may wait for the network, and so is not the
//! one that watches the calls.
use super::group::{Group, News, SuspectedFailure};
use super::health_store::{HealthStore, Heartbeat, ProgressQuery, ShutdownRecord};
use super::report::ProgressReport;
use crate::Result;
use crate::backend::awake::AwakeClock;
use crate::backend::call::{Call, Channel};
use crate::error::Failure;
use std::time::{Duration, Instant};

/// How long other ranks are given to say where they are.
pub(super) const PATIENCE: Duration = Duration::from_secs(4);

/// Between two looks at the store while something is being found out.
const PAUSE: Duration = Duration::from_millis(200);

pub(super) struct HeartbeatMonitor<'a> {
    pub(super) group: &'a Group,
    pub(super) health_store: &'a HealthStore,
    /// A peer that gives no sign of heartbeat for this long is taken for dead.
    pub(super) lost_after: Duration,
}

/// What is remembered between two looks.
struct Memory {
    beats: u64,
    /// All times here are its: a rank that was stopped together with its peers must not take them for dead when it goes on,
    /// before they have.
    clock: AwakeClock,
    /// The next rank in the ring that has not left: each rank watches one other, so that the store's work is small.
    watched: Option<usize>,
    /// Its last sign of heartbeat, and when that was new.
    seen: (Heartbeat, Instant),
    /// Since when the store has not answered, and what it said.
    without_store: Option<(Instant, String)>,
    answered: Option<ProgressQuery>,
}

impl Memory {
    fn now(&self) -> Instant {
        self.clock.at(Instant::now())
    }
}

impl HeartbeatMonitor<'_> {
    /// Until this rank leaves.
    pub(super) fn run(&self) {
        let tick = Duration::from_secs(1).min(self.lost_after / 5);
        let begin = Instant::now();
        let mut memory = Memory {
            beats: 0,
            clock: AwakeClock::new(begin, 2 * tick),
            watched: self.after(self.group.rank),
            seen: (Heartbeat::Beats(0), begin),
            without_store: None,
            answered: None,
        };
        loop {
            memory.clock.sleep(Instant::now());
            let News { suspected, unpublished, leaving } = self.group.news(tick);
            memory.clock.wake(Instant::now());
            if let Some(suspected) = suspected {
                let failure = self.resolve(&suspected, &mut memory);
                let first = self.health_store.publish(&failure).unwrap_or(failure);
                self.group.fail_as_published(first);
            }
            if let Some(failure) = unpublished {
                // Once: a store that is gone does not come back with this key in it.
                if let Err(error) = self.health_store.publish(&failure) {
                    log::debug!("rank {}: cannot tell the others of the failure: {error}", self.group.rank);
                }
                self.group.set_published();
            }
            if let Some(shutdown_notice) = leaving {
                if let Err(error) = self.health_store.leave(&shutdown_notice) {
                    log::debug!("rank {}: cannot say goodbye: {error}", self.group.rank);
                }
                return;
            }
            let start = memory.now();
            let result = self.round(&mut memory, start);
            // While the store does not answer, the peer may not be able to give a sign of heartbeat either.
            memory.seen.1 += memory.now().saturating_duration_since(start);
            match result {
                Ok(()) => memory.without_store = None,
                Err(error) => self.store_failed(&mut memory, error.to_string()),
            }
        }
    }

    /// The next rank in the ring, `None` in a world of one.
    fn after(&self, rank: usize) -> Option<usize> {
        let next = (rank + 1) % self.group.world_size;
        (next != self.group.rank).then_some(next)
    }

    /// A sign of heartbeat, and a look at what the others say; since `start`, by the memory's clock.
    fn round(&self, memory: &mut Memory, start: Instant) -> Result<()> {
        self.beat(memory)?;
        // When everybody else has left, there is still their departure to look at.
        let look = self.health_store.look(memory.watched.unwrap_or(self.group.rank))?;
        if let Some(failure) = look.failure {
            self.group.fail_as_published(failure);
            return Ok(());
        }
        if let Some(failure) = self.in_vain(look.departure)? {
            self.group.fail(failure);
            return Ok(());
        }
        if look.query != memory.answered
            && let Some(query) = look.query
        {
            self.health_store.answer(&self.group.progress_report())?;
            memory.answered = Some(query);
        }
        let Some(peer) = memory.watched else { return Ok(()) };
        match look.heartbeat {
            Heartbeat::Left => {
                memory.watched = self.after(peer);
                memory.seen = (Heartbeat::Beats(0), memory.now());
            }
            heartbeat if heartbeat != memory.seen.0 => memory.seen = (heartbeat, memory.now()),
            _ if start.saturating_duration_since(memory.seen.1) >= self.lost_after => {
                self.group.fail(self.lost(peer));
            }
            _ => {}
        }
        Ok(())
    }

    /// The failure if a call is under way that waits in vain for a rank which has left.
    fn in_vain(&self, departure: Option<ShutdownRecord>) -> Result<Option<Failure>> {
        if let Some(failure) = self.missing(departure) {
            return Ok(Some(failure));
        }
        for (channel, sequence, call) in self.group.messages() {
            let (Channel::SendTo(peer) | Channel::RecvFrom(peer)) = channel else { continue };
            let Some(theirs) = self.health_store.messages_of(peer)? else { continue };
            let left_after = if matches!(channel, Channel::SendTo(_)) { theirs.received } else { theirs.sent };
            if left_after < sequence {
                return Ok(Some(Failure::PeerLeft { peer, left_after, call: call.to_string(), sequence }));
            }
        }
        Ok(None)
    }

    /// The same, of collectives.
    fn missing(&self, departure: Option<ShutdownRecord>) -> Option<Failure> {
        let ShutdownRecord { rank: peer, last } = departure.filter(|departure| departure.rank != self.group.rank)?;
        let (sequence, call) = self.group.missed_by(last)?;
        Some(Failure::PeerLeft { peer, left_after: last, call: call.to_string(), sequence })
    }

    fn beat(&self, memory: &mut Memory) -> Result<()> {
        memory.beats += 1;
        self.health_store.beat(memory.beats)
    }

    fn lost(&self, peer: usize) -> Failure {
        let reason = format!(
            "it has given no sign of heartbeat for {:?}: its process was killed or stopped, or its host is out of reach. Look \
             for the first error in its output",
            self.lost_after
        );
        Failure::PeerFailed { peer, reason }
    }

    /// A store that is gone is no failure as long as the calls go on: at the end of a run its host may be the first to
    /// leave. A call that hangs without it is one.
    fn store_failed(&self, memory: &mut Memory, error: String) {
        let now = memory.now();
        let (since, first) = memory.without_store.get_or_insert_with(|| {
            log::debug!("rank {}: the store does not answer: {error}", self.group.rank);
            (now, error)
        });
        if now.saturating_duration_since(*since) >= self.lost_after && self.group.is_busy() {
            let reason = format!("it has waited for a collective since the store of the group was lost: {first}");
            self.group.fail(Failure::PeerFailed { peer: self.group.rank, reason });
        }
    }

    /// Finds out what is behind `suspected`.
    fn resolve(&self, suspected: &SuspectedFailure, memory: &mut Memory) -> Failure {
        let result = match suspected {
            SuspectedFailure::Broken(reason) => self.why_broken(reason, memory),
            SuspectedFailure::Expired { channel: Channel::Collectives, sequence, call } => {
                self.why_expired(*sequence, *call, memory)
            }
            SuspectedFailure::Expired { .. } => Ok(without_asking(self.group, suspected)),
        };
        result.unwrap_or_else(|error| {
            log::debug!("rank {}: cannot ask the other ranks: {error}", self.group.rank);
            without_asking(self.group, suspected)
        })
    }

    /// NCCL often reports the death of a peer, or that it aborted or left, without saying which: whoever has ended the group
    /// on purpose or left has said so in the store, and whoever is dead gives no more signs of heartbeat.
    fn why_broken(&self, reason: &str, memory: &mut Memory) -> Result<Failure> {
        let before = self.health_store.heartbeats()?;
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            let look = self.health_store.look(self.group.rank)?;
            if let Some(failure) = look.failure {
                return Ok(failure);
            }
            if let Some(failure) = self.in_vain(look.departure)? {
                return Ok(failure);
            }
            // Others look for signs of heartbeat, perhaps for the same reason.
            self.beat(memory)?;
            std::thread::sleep(PAUSE);
        }
        let after = self.health_store.heartbeats()?;
        let dead = |peer: &usize| *peer != self.group.rank && before[*peer] == after[*peer];
        let alive = |heartbeat: &Heartbeat| matches!(heartbeat, Heartbeat::Beats(_));
        let dead = (0..before.len().min(after.len())).filter(|peer| alive(&after[*peer])).find(dead);
        let own = Failure::PeerFailed { peer: self.group.rank, reason: reason.to_string() };
        Ok(dead.map_or(own, |peer| Failure::PeerFailed {
            peer,
            reason: format!(
                "it gives no sign of heartbeat any more (rank {}: {reason}). Look for the first error in its output",
                self.group.rank
            ),
        }))
    }

    /// Asks all ranks where they are. When several ask, one does for all, and the others wait for its root_cause.
    fn why_expired(&self, sequence: u64, call: Call, memory: &mut Memory) -> Result<Failure> {
        let query = self.health_store.ask(sequence)?;
        self.health_store.answer(&self.group.progress_report())?;
        let asked_first = query.rank == self.group.rank;
        let deadline = Instant::now() + PATIENCE;
        let mut reports = Vec::new();
        while Instant::now() < deadline {
            if let Some(failure) = self.health_store.look(self.group.rank)?.failure {
                return Ok(failure);
            }
            if asked_first {
                reports = self.health_store.reports()?;
                if reports.iter().all(Option::is_some) {
                    break;
                }
            }
            // Others look for signs of heartbeat, perhaps for the same reason.
            self.beat(memory)?;
            std::thread::sleep(PAUSE);
        }
        if !asked_first {
            // It has died over its query.
            reports = self.health_store.reports()?;
        }
        Ok(root_cause(self.group, sequence, call, &reports))
    }
}

/// What can be said without the other ranks.
pub(super) fn without_asking(group: &Group, suspected: &SuspectedFailure) -> Failure {
    let Group { rank, timeout, .. } = *group;
    match suspected {
        SuspectedFailure::Broken(reason) => Failure::PeerFailed { peer: rank, reason: reason.clone() },
        SuspectedFailure::Expired { channel, sequence, call } => {
            let reason = match channel {
                Channel::Collectives => "the other ranks cannot be asked why".to_string(),
                Channel::SendTo(peer) | Channel::RecvFrom(peer) => {
                    format!("rank {peer} did not make the matching call")
                }
            };
            Failure::TimedOut { rank, call: call.to_string(), sequence: *sequence, timeout, reason }
        }
    }
}

/// What the `reports` of all ranks say about `call`, number `sequence`, that has not ended in time.
///
/// Ranks that differed once may have gone on: with little data NCCL takes one call for another. So the first difference
/// that is remembered counts, and not what they are in now.
fn root_cause(group: &Group, sequence: u64, call: Call, reports: &[Option<ProgressReport>]) -> Failure {
    let Group { rank, timeout, .. } = *group;
    let ours = group.progress_report();
    let peers = || reports.iter().enumerate().filter(|(peer, _)| *peer != rank);
    let differences = peers().filter_map(|(peer, report)| {
        let report = report.as_ref()?;
        let known = 1..=ours.started.min(report.started);
        let differ = |sequence: &u64| {
            let (ours, theirs) = (ours.call_at(*sequence), report.call_at(*sequence));
            ours.is_some() && theirs.is_some() && ours != theirs
        };
        let sequence = known.skip_while(|sequence| ours.call_at(*sequence).is_none()).find(differ)?;
        Some((sequence, (rank, ours.call_at(sequence)?), (peer, report.call_at(sequence)?)))
    });
    if let Some((sequence, ours, theirs)) = differences.min_by_key(|difference| difference.0) {
        return desync(sequence, ours, theirs);
    }
    let mut reasons = Vec::new();
    for (peer, report) in peers() {
        let Some(report) = report else {
            reasons.push(format!("rank {peer} does not answer: its process is stopped, or its host cannot be reached"));
            continue;
        };
        if report.started >= sequence {
            continue;
        }
        reasons.push(match report.calls.last() {
            Some(last) => {
                format!("rank {peer} has not started this collective: its last was sequence {}, {last}", report.started)
            }
            None => format!("rank {peer} has not started any collective"),
        });
    }
    if reasons.is_empty() {
        reasons
            .push("all ranks have started it: a GPU or the network between them is too slow, or is stuck".to_string());
    }
    Failure::TimedOut { rank, call: call.to_string(), sequence, timeout, reason: reasons.join("; ") }
}

/// The higher rank is named first, so that all say the same.
fn desync(sequence: u64, ours: (usize, Call), theirs: (usize, Call)) -> Failure {
    let (a, b) = if ours.0 > theirs.0 { (ours, theirs) } else { (theirs, ours) };
    let (call_a, call_b) = a.1.describe_both(&b.1);
    Failure::Desync { sequence, rank_a: a.0, call_a, rank_b: b.0, call_b }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Label;
    use crate::backend::call::Operation;
    use crate::backend::nccl::group::Fence;
    use std::sync::Arc;

    struct Never;

    impl Fence for Never {
        fn is_over(&self) -> std::result::Result<bool, String> {
            Ok(false)
        }
    }

    const BARRIER: Call = Call {
        operation: Operation::Barrier,
        element: None,
        reduction: None,
        root: None,
        count: 0,
        label: Label::NONE,
    };
    const ALL_REDUCE: Call = Call { operation: Operation::AllReduce, count: 20, ..BARRIER };

    /// What rank 0 makes of the others' reports after barriers and, as number 17, an all-reduce.
    fn text(others: Vec<Option<ProgressReport>>) -> String {
        let group = Group::new(0, others.len() + 1, Duration::from_secs(7));
        for call in [BARRIER; 16].into_iter().chain([ALL_REDUCE]) {
            group.begin(Channel::Collectives, call, Arc::new(Never)).unwrap();
        }
        let reports: Vec<_> = std::iter::once(Some(group.progress_report())).chain(others).collect();
        crate::Error::from(root_cause(&group, 17, ALL_REDUCE, &reports)).to_string()
    }

    fn report(calls: &[Call]) -> Option<ProgressReport> {
        let started = calls.len() as u64;
        Some(ProgressReport { started, finished: started.saturating_sub(1), calls: calls.to_vec() })
    }

    #[test]
    fn a_rank_that_called_something_else_is_told_with_its_call() {
        let text = text(vec![report(&[BARRIER; 18]), None]);
        assert!(text.contains("rank 1 called barrier() where rank 0 called all_reduce(), sequence 17"), "{text}");
    }

    #[test]
    fn the_first_difference_counts() {
        let mut calls = [BARRIER; 20];
        calls[4] = ALL_REDUCE;
        let text = text(vec![report(&[BARRIER; 18]), report(&calls)]);
        assert!(text.contains("rank 2 called all_reduce() where rank 0 called barrier(), sequence 5"), "{text}");
    }

    #[test]
    fn ranks_that_are_elsewhere_are_named() {
        let same: Vec<Call> = [BARRIER; 16].into_iter().chain([ALL_REDUCE]).collect();
        let behind = text(vec![report(&same), report(&same[..16]), report(&[]), None]);
        assert!(behind.contains("rank 0: all_reduce(), sequence 17, timed out after 7s"), "{behind}");
        assert!(
            behind.contains("rank 2 has not started this collective: its last was sequence 16, barrier()"),
            "{behind}"
        );
        assert!(behind.contains("rank 3 has not started any collective"), "{behind}");
        assert!(behind.contains("rank 4 does not answer") && !behind.contains("rank 1 "), "{behind}");
        let slow = text(vec![report(&same)]);
        assert!(slow.contains("all ranks have started it"), "{slow}");
    }
}
