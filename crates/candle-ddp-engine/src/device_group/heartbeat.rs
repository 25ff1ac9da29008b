//! The thread that stays in touch with the other ranks through the store. It may have to wait for the network, so it is
//! separate from the thread that watches the calls.
use super::group::{DeviceGroup, News, SuspectedFailure};
use super::health_store::{HealthStore, ProgressQuery, ShutdownRecord};
use crate::error::Failure;
use crate::failure::{CallCounts, ExpiredCall, RankState, diagnose, left_before};
use crate::rendezvous::liveness::{Ring, await_heard, has_left};
use crate::standing::Member;
use crate::{Call, Channel, Result};
use std::time::{Duration, Instant};

/// How long other ranks have to report their progress.
pub(super) const PATIENCE: Duration = Duration::from_secs(4);

/// How long other ranks have to say where they stand.
const ANSWERS: Duration = Duration::from_secs(3);

/// The longest time between two looks into the store.
const TICK: Duration = Duration::from_millis(500);

/// The time between two requests to the store during the search for a root cause.
const PAUSE: Duration = Duration::from_millis(200);

/// The body of that thread.
#[derive(Debug)]
pub struct HeartbeatMonitor<'a> {
    /// Its group.
    pub group: &'a DeviceGroup,
    /// The group's store.
    pub health_store: &'a HealthStore,
    /// A peer without a heartbeat for this long is considered dead.
    pub lost_after: Duration,
}

/// The state between two rounds.
struct MonitorState {
    beats: u64,
    ring: Ring,
    /// How long the store has not answered, and its first error.
    without_store: Option<(Duration, String)>,
    answered: Option<ProgressQuery>,
    /// The number of the last question where all ranks stand, and when this rank saw that another one had asked it.
    asked: u64,
    heard: Option<Instant>,
    /// Whether the others have been told that this rank knows of the failure.
    told: bool,
}

impl HeartbeatMonitor<'_> {
    /// Runs until this rank leaves.
    pub fn run(&self) {
        let tick = self.tick();
        let mut state = MonitorState {
            beats: 0,
            ring: Ring::new(self.group.rank, self.group.world_size),
            without_store: None,
            answered: None,
            asked: 0,
            heard: None,
            told: false,
        };
        loop {
            let News { suspected, unpublished, leaving, asks } = self.group.news(tick);
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
                self.await_told();
                if let Err(error) = self.health_store.leave(&shutdown_notice) {
                    log::debug!("rank {}: cannot say goodbye: {error}", self.group.rank);
                }
                return;
            }
            if asks {
                let answers = self.where_all_stand(&mut state).unwrap_or_else(|error| {
                    log::debug!("rank {}: cannot ask where the others stand: {error}", self.group.rank);
                    Vec::new()
                });
                self.group.answer(answers);
            }
            let start = Instant::now();
            match self.round(&mut state) {
                Ok(()) => state.without_store = None,
                Err(error) => self.store_failed(&mut state, tick + start.elapsed(), error.to_string()),
            }
        }
    }

    /// The time between two rounds.
    fn tick(&self) -> Duration {
        TICK.min(self.lost_after / 5)
    }

    /// If the store ends with this process, a failed group does not end before the other ranks know why it failed, or
    /// had the time to learn it. Otherwise they would have to guess. They do not miss heartbeats meanwhile: they read the
    /// failure first.
    fn await_told(&self) {
        let Some(failure) = self.group.failure().filter(|_| self.health_store.is_hosted_here()) else { return };
        let culprit = failure.culprit();
        if let Err(error) = await_heard(Instant::now() + PATIENCE, || self.health_store.all_told_but(culprit)) {
            log::debug!("rank {}: cannot see who knows of the failure: {error}", self.group.rank);
        }
    }

    /// Writes a heartbeat and reads what the others have written.
    fn round(&self, state: &mut MonitorState) -> Result<()> {
        self.beat(state)?;
        // Even if all other ranks have left, their departure still matters.
        let look = self.health_store.look(state.ring.watched().unwrap_or(self.group.rank))?;
        if let Some(failure) = look.failure {
            self.group.fail_as_published(failure);
            return Ok(());
        }
        if let Some(failure) = self.in_vain(look.departure)? {
            self.group.fail(failure);
            return Ok(());
        }
        self.answer_standing(look.asked, state)?;
        if look.query != state.answered
            && let Some(query) = look.query
        {
            self.health_store.answer(&self.group.progress_report())?;
            state.answered = Some(query);
        }
        if let Some(peer) = state.ring.watched()
            && self.tick() * state.ring.saw(&look.heartbeat) >= self.lost_after
        {
            self.group.fail(self.lost(peer));
        }
        Ok(())
    }

    /// Says where this rank stands, if another rank has asked.
    fn answer_standing(&self, asked: u64, state: &mut MonitorState) -> Result<()> {
        if asked > state.asked {
            self.health_store.answer_standing(asked, &self.group.report())?;
            (state.asked, state.heard) = (asked, Some(Instant::now()));
        }
        Ok(())
    }

    /// Asks where all ranks stand; returns the answers of the others. None if another rank has just asked, which decides for all.
    fn where_all_stand(&self, state: &mut MonitorState) -> Result<Vec<Vec<u8>>> {
        const RECENT: Duration = Duration::from_secs(2);
        const PAUSE: Duration = Duration::from_millis(100);
        if state.heard.is_some_and(|heard| heard.elapsed() < RECENT) {
            return Ok(Vec::new());
        }
        let number = self.health_store.ask_standing()?;
        state.asked = state.asked.max(number);
        let deadline = Instant::now() + ANSWERS;
        loop {
            let answers = self.health_store.standings(number)?;
            if answers.iter().all(Option::is_some) || Instant::now() >= deadline || Member::is_over(self.group) {
                return Ok(answers.into_iter().flatten().collect());
            }
            std::thread::sleep(PAUSE);
            // Others ask as well, and watch this rank's heartbeat.
            let look = self.health_store.look(self.group.rank)?;
            if look.failure.is_some() {
                return Ok(Vec::new());
            }
            self.answer_standing(look.asked, state)?;
            self.beat(state)?;
        }
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

    /// Takes note that the store has not answered, again, for a round that took `time`. The loss of the store alone is not a
    /// failure, since its host may be the first to leave at the end of a run. It becomes one if a call is in flight for that long.
    fn store_failed(&self, state: &mut MonitorState, time: Duration, error: String) {
        let Some((lost, first)) = &mut state.without_store else {
            log::debug!("rank {}: the store does not answer: {error}", self.group.rank);
            state.without_store = Some((Duration::ZERO, error));
            return;
        };
        *lost += time;
        if *lost >= self.lost_after && self.group.is_busy() {
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

    /// An engine such as NCCL often reports that a peer has died, aborted or left, without naming it. A peer that ended the group or left
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
        let dead = (0..before.len().min(after.len())).filter(|peer| !has_left(&after[*peer])).find(dead);
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
pub fn without_asking(group: &DeviceGroup, suspected: &SuspectedFailure) -> Failure {
    match suspected {
        SuspectedFailure::Broken(reason) => Failure::PeerFailed { peer: group.rank, reason: reason.clone() },
        SuspectedFailure::Expired { channel, sequence, call } => {
            let partners = group.partners(*channel, *sequence);
            let awaited = Some(&*partners).filter(|_| *channel != Channel::Collectives);
            diagnose(&ExpiredCall { awaited, ..group.expired(*channel, *sequence, *call) }, &[])
        }
    }
}
