//! The thread that stays in touch with the other ranks through the store. It may have to wait for the network, so it is
//! separate from the thread that watches the calls.
use super::group::{Group, News, SuspectedFailure};
use super::health_store::{HealthStore, Heartbeat, ProgressQuery, ShutdownRecord};
use crate::backend::awake::AwakeClock;
use crate::error::Failure;
use crate::rendezvous::Result;
use candle_ddp_engine::failure::{CallCounts, ExpiredCall, RankState, diagnose, left_before};
use candle_ddp_engine::{Call, Channel};
use std::time::{Duration, Instant};

/// How long other ranks have to report their progress.
pub(super) const PATIENCE: Duration = Duration::from_secs(4);

/// The longest time between two looks into the store.
const TICK: Duration = Duration::from_millis(500);

/// The time between two requests to the store during the search for a root cause.
const PAUSE: Duration = Duration::from_millis(200);

pub(super) struct HeartbeatMonitor<'a> {
    pub(super) group: &'a Group,
    pub(super) health_store: &'a HealthStore,
    /// A peer without a heartbeat for this long is considered dead.
    pub(super) lost_after: Duration,
}

/// The state between two rounds.
struct MonitorState {
    beats: u64,
    /// All times here are by this clock: a rank that was stopped together with its peers and continues before they do
    /// must not consider them dead.
    clock: AwakeClock,
    /// The next rank in the ring that has not left. Each rank watches one other, so that the store has little work.
    watched: Option<usize>,
    /// Its last heartbeat, and when that was new.
    seen: (Heartbeat, Instant),
    /// Since when the store has not answered, and its error.
    without_store: Option<(Instant, String)>,
    answered: Option<ProgressQuery>,
    /// Whether the others have been told that this rank knows of the failure.
    told: bool,
}

impl MonitorState {
    fn now(&self) -> Instant {
        self.clock.at(Instant::now())
    }
}

impl HeartbeatMonitor<'_> {
    /// Runs until this rank leaves.
    pub(super) fn run(&self) {
        let tick = TICK.min(self.lost_after / 5);
        let begin = Instant::now();
        let mut state = MonitorState {
            beats: 0,
            clock: AwakeClock::new(begin, 2 * tick),
            watched: self.after(self.group.rank),
            seen: (Heartbeat::Beats(0), begin),
            without_store: None,
            answered: None,
            told: false,
        };
        loop {
            state.clock.sleep(Instant::now());
            let News { suspected, unpublished, leaving } = self.group.news(tick);
            state.clock.wake(Instant::now());
            if let Some(suspected) = suspected {
                let failure = self.resolve(&suspected, &mut state);
                let first = self.health_store.publish(&failure).unwrap_or(failure);
                self.group.fail_as_published(first);
            }
            if let Some(failure) = unpublished {
                // Only once: if the store is gone, it does not come back with this group's keys.
                if let Err(error) = self.health_store.publish(&failure) {
                    log::debug!("rank {}: cannot tell the others of the failure: {error}", self.group.rank);
                }
                self.group.set_published();
            }
            if !state.told && self.group.failure().is_some() {
                state.told = true;
                if let Err(error) = self.health_store.set_told() {
                    log::debug!("rank {}: cannot say that it knows of the failure: {error}", self.group.rank);
                }
            }
            if let Some(shutdown_notice) = leaving {
                self.await_told(&mut state);
                if let Err(error) = self.health_store.leave(&shutdown_notice) {
                    log::debug!("rank {}: cannot say goodbye: {error}", self.group.rank);
                }
                return;
            }
            let start = state.now();
            let result = self.round(&mut state, start);
            // While the store does not answer, the peer may be unable to write its heartbeat too.
            state.seen.1 += state.now().saturating_duration_since(start);
            match result {
                Ok(()) => state.without_store = None,
                Err(error) => self.store_failed(&mut state, error.to_string()),
            }
        }
    }

    /// If the store ends with this process, a failed group does not end before the other ranks know why it failed, or
    /// had the time to learn it. Otherwise they would have to guess.
    fn await_told(&self, state: &mut MonitorState) {
        let Some(failure) = self.group.failure().filter(|_| self.health_store.is_hosted_here()) else { return };
        let culprit = failure.culprit();
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline && self.health_store.all_told_but(culprit).is_ok_and(|told| !told) {
            if self.beat(state).is_err() {
                return;
            }
            std::thread::sleep(PAUSE / 10);
        }
    }

    /// The next rank in the ring; `None` in a world of one.
    fn after(&self, rank: usize) -> Option<usize> {
        let next = (rank + 1) % self.group.world_size;
        (next != self.group.rank).then_some(next)
    }

    /// Writes a heartbeat and reads what the others have written. The round began at `start`, by the state's clock.
    fn round(&self, state: &mut MonitorState, start: Instant) -> Result<()> {
        self.beat(state)?;
        // Even if all other ranks have left, their departure still matters.
        let look = self.health_store.look(state.watched.unwrap_or(self.group.rank))?;
        if let Some(failure) = look.failure {
            self.group.fail_as_published(failure);
            return Ok(());
        }
        if let Some(failure) = self.in_vain(look.departure)? {
            self.group.fail(failure);
            return Ok(());
        }
        if look.query != state.answered
            && let Some(query) = look.query
        {
            self.health_store.answer(&self.group.progress_report())?;
            state.answered = Some(query);
        }
        let Some(peer) = state.watched else { return Ok(()) };
        match look.heartbeat {
            Heartbeat::Left => {
                state.watched = self.after(peer);
                state.seen = (Heartbeat::Beats(0), state.now());
            }
            heartbeat if heartbeat != state.seen.0 => state.seen = (heartbeat, state.now()),
            _ if start.saturating_duration_since(state.seen.1) >= self.lost_after => {
                self.group.fail(self.lost(peer));
            }
            _ => {}
        }
        Ok(())
    }

    /// The failure if a call in flight needs a rank that has left.
    fn in_vain(&self, departure: Option<ShutdownRecord>) -> Result<Option<Failure>> {
        if let Some(ShutdownRecord { rank: peer, last }) = departure.filter(|record| record.rank != self.group.rank)
            && let Some((sequence, call)) = self.group.missed_by(last)
        {
            let counts = CallCounts { collectives: last, ..CallCounts::default() };
            return Ok(left_before(peer, counts, Channel::Collectives, sequence, || call.to_string()));
        }
        for (channel, sequence, call) in self.group.messages() {
            let (Channel::SendTo(peer) | Channel::RecvFrom(peer)) = channel else { continue };
            let Some(counts) = self.health_store.counts_of(peer)? else { continue };
            let failure = left_before(peer, counts, channel, sequence, || call.to_string());
            if failure.is_some() {
                return Ok(failure);
            }
        }
        Ok(None)
    }

    fn beat(&self, state: &mut MonitorState) -> Result<()> {
        state.beats += 1;
        self.health_store.beat(state.beats)
    }

    fn lost(&self, peer: usize) -> Failure {
        let reason = format!(
            "it has not sent a heartbeat for {:?}: its process was killed or stopped, or its host is out of reach. Look for \
             the first error in its output",
            self.lost_after
        );
        Failure::PeerFailed { peer, reason }
    }

    /// The loss of the store alone is not a failure, since its host may be the first to leave at the end of a run. It
    /// becomes one if a call is in flight for that long.
    fn store_failed(&self, state: &mut MonitorState, error: String) {
        let now = state.now();
        let (since, first) = state.without_store.get_or_insert_with(|| {
            log::debug!("rank {}: the store does not answer: {error}", self.group.rank);
            (now, error)
        });
        if now.saturating_duration_since(*since) >= self.lost_after && self.group.is_busy() {
            let reason = format!("it has waited for a collective since the store of the group was lost: {first}");
            self.group.fail(Failure::PeerFailed { peer: self.group.rank, reason });
        }
    }

    /// Finds the root cause of `suspected`.
    fn resolve(&self, suspected: &SuspectedFailure, state: &mut MonitorState) -> Failure {
        let result = match suspected {
            SuspectedFailure::Broken(reason) => self.why_broken(reason, state),
            SuspectedFailure::Expired { channel: Channel::Collectives, sequence, call } => {
                self.why_expired(*sequence, *call, state)
            }
            // Only the two ranks of a message know of it.
            SuspectedFailure::Expired { .. } => Ok(without_asking(self.group, suspected)),
        };
        result.unwrap_or_else(|error| {
            log::debug!("rank {}: cannot ask the other ranks: {error}", self.group.rank);
            without_asking(self.group, suspected)
        })
    }

    /// NCCL often reports that a peer has died, aborted or left, without naming it. A peer that ended the group or left
    /// has written so into the store, and a dead one sends no more heartbeats.
    fn why_broken(&self, reason: &str, state: &mut MonitorState) -> Result<Failure> {
        let before = self.health_store.heartbeats()?;
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            let look = self.health_store.look(self.group.rank)?;
            // The program may have ended the group meanwhile.
            if let Some(failure) = look.failure.or_else(|| self.group.failure()) {
                return Ok(failure);
            }
            if let Some(failure) = self.in_vain(look.departure)? {
                return Ok(failure);
            }
            // Other ranks watch this rank's heartbeat, perhaps for the same reason.
            self.beat(state)?;
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
                "it sends no more heartbeats (rank {}: {reason}). Look for the first error in its output",
                self.group.rank
            ),
        }))
    }

    /// Asks all ranks for their progress. If several ranks ask, the first one does so for all, and the others wait for
    /// the root cause that it finds.
    fn why_expired(&self, sequence: u64, call: Call, state: &mut MonitorState) -> Result<Failure> {
        let query = self.health_store.ask(sequence)?;
        self.health_store.answer(&self.group.progress_report())?;
        let asked_first = query.rank == self.group.rank;
        let deadline = Instant::now() + PATIENCE;
        let mut reports = Vec::new();
        while Instant::now() < deadline {
            if let Some(failure) = self.health_store.look(self.group.rank)?.failure.or_else(|| self.group.failure()) {
                return Ok(failure);
            }
            if asked_first {
                reports = self.health_store.reports()?;
                if reports.iter().all(Option::is_some) {
                    break;
                }
            }
            // Other ranks watch this rank's heartbeat, perhaps for the same reason.
            self.beat(state)?;
            std::thread::sleep(PAUSE);
        }
        if !asked_first {
            // The rank that asked has died before it found a root cause.
            reports = self.health_store.reports()?;
        }
        let ranks = reports.into_iter().map(|report| report.map_or(RankState::Silent, RankState::Running));
        Ok(diagnose(&self.group.expired(Channel::Collectives, sequence, call), &ranks.collect::<Vec<_>>()))
    }
}

/// The failure behind `suspected`, as far as it is known without the other ranks.
pub(super) fn without_asking(group: &Group, suspected: &SuspectedFailure) -> Failure {
    match suspected {
        SuspectedFailure::Broken(reason) => Failure::PeerFailed { peer: group.rank, reason: reason.clone() },
        SuspectedFailure::Expired { channel, sequence, call } => {
            let partners = group.partners(*channel, *sequence);
            let awaited = Some(&*partners).filter(|_| *channel != Channel::Collectives);
            diagnose(&ExpiredCall { awaited, ..group.expired(*channel, *sequence, *call) }, &[])
        }
    }
}
