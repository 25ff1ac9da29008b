//! What all threads of one rank know about their group: which calls are under way, and why it failed.
use super::lock;
use super::report::{ProgressReport, ShutdownNotice};
use crate::Error;
use crate::backend::call::{Call, Channel};
use crate::backend::progress::Progress;
use crate::deadline::deadline_after;
use crate::error::Failure;
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How a call under way tells that it is over.
pub(super) trait Fence: Send + Sync {
    /// An error is one of the device, which nothing on it survives.
    fn is_over(&self) -> Result<bool, String>;
}

/// One group, as seen by one of its ranks.
pub(super) struct Group {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    /// How long a call may take.
    pub(super) timeout: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Something is wrong; what is behind it is being looked into.
    suspected: Option<SuspectedFailure>,
    failure: Option<Failure>,
    /// The other ranks know of the failure, or told it.
    published: bool,
    collectives: Progress,
    /// The sequence number of the last call on each channel.
    started: HashMap<Channel, u64>,
    /// The last collective that was seen to be over.
    finished: u64,
    outstanding: Vec<Outstanding>,
    /// This rank is about to leave in good order.
    leaving: bool,
    /// The watchdog should end.
    over: bool,
}

struct Outstanding {
    channel: Channel,
    sequence: u64,
    call: Call,
    deadline: Instant,
    fence: Arc<dyn Fence>,
}

/// What the watchdog sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum SuspectedFailure {
    /// NCCL or the device reported an error.
    Broken(String),
    /// A call has not ended in time.
    Expired { channel: Channel, sequence: u64, call: Call },
}

impl Group {
    pub(super) fn new(rank: usize, world_size: usize, timeout: Duration) -> Self {
        Self { rank, world_size, timeout, state: Mutex::default(), changed: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Notes that `call` is about to be started, and how it tells its end; its sequence number.
    pub(super) fn begin(&self, channel: Channel, call: Call, fence: Arc<dyn Fence>) -> Result<u64, Failure> {
        if let Some(failure) = self.root_cause() {
            return Err(failure);
        }
        let mut state = self.state();
        let sequence = state.started.get(&channel).map_or(1, |last| last + 1);
        state.started.insert(channel, sequence);
        if channel == Channel::Collectives {
            state.collectives.start(sequence, call);
        }
        let deadline = deadline_after(self.timeout);
        state.outstanding.push(Outstanding { channel, sequence, call, deadline, fence });
        Ok(sequence)
    }

    /// Forgets calls that are over. The first that has not ended in time, or an error of the device.
    pub(super) fn sweep(&self, now: Instant) -> Option<SuspectedFailure> {
        let mut state = self.state();
        let State { outstanding, finished, .. } = &mut *state;
        let mut broken = None;
        outstanding.retain(|call| match call.fence.is_over() {
            Ok(true) => {
                if call.channel == Channel::Collectives {
                    *finished = call.sequence.max(*finished);
                }
                false
            }
            Ok(false) => true,
            Err(reason) => {
                broken = Some(SuspectedFailure::Broken(reason));
                true
            }
        });
        if outstanding.is_empty() {
            self.changed.notify_all();
        }
        let expired = |call: &&Outstanding| call.deadline <= now;
        broken.or_else(|| {
            let Outstanding { channel, sequence, call, .. } = *outstanding.iter().find(expired)?;
            Some(SuspectedFailure::Expired { channel, sequence, call })
        })
    }

    /// Waits until nothing is under way; the failure, if that comes first. Every call has its deadline.
    pub(super) fn drain(&self) -> Option<Failure> {
        let mut state = self.state();
        while state.failure.is_none() && !state.outstanding.is_empty() {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.failure.clone()
    }

    /// Whether any call is under way, as far as it is known without asking the device.
    pub(super) fn is_busy(&self) -> bool {
        !self.state().outstanding.is_empty()
    }

    /// The collective that a rank which left after number `last` is missed in.
    pub(super) fn missed_by(&self, last: u64) -> Option<(u64, Call)> {
        let state = self.state();
        let collectives = state.outstanding.iter().filter(|call| call.channel == Channel::Collectives);
        collectives.filter(|call| call.sequence > last).map(|call| (call.sequence, call.call)).min_by_key(|call| call.0)
    }

    /// The messages that are under way: where, the number, and the call.
    pub(super) fn messages(&self) -> Vec<(Channel, u64, Call)> {
        let state = self.state();
        let messages = state.outstanding.iter().filter(|call| call.channel != Channel::Collectives);
        messages.map(|call| (call.channel, call.sequence, call.call)).collect()
    }

    pub(super) fn progress_report(&self) -> ProgressReport {
        const REMEMBERED: u64 = 1000;
        let state = self.state();
        let started = state.started.get(&Channel::Collectives).copied().unwrap_or(0);
        let first = started.saturating_sub(REMEMBERED) + 1;
        let calls = (first..=started).filter_map(|sequence| state.collectives.call_at(sequence)).collect();
        ProgressReport { started, finished: state.finished, calls }
    }

    /// Something is wrong: from now on nobody believes that a call went well, until the failure is known.
    pub(super) fn suspect(&self, suspected: SuspectedFailure) {
        let mut state = self.state();
        if state.failure.is_none() && state.suspected.is_none() {
            log::debug!("rank {}: {suspected:?}", self.rank);
            state.suspected = Some(suspected);
            self.changed.notify_all();
        }
    }

    /// Ends the group with `failure`, unless it has one already; the first one.
    pub(super) fn fail(&self, failure: Failure) -> Failure {
        self.set_failure(failure, false)
    }

    /// The same with a failure that the other ranks know already.
    pub(super) fn fail_as_published(&self, failure: Failure) -> Failure {
        self.set_failure(failure, true)
    }

    fn set_failure(&self, failure: Failure, published: bool) -> Failure {
        let mut state = self.state();
        if let Some(first) = &state.failure {
            return first.clone();
        }
        log::debug!("rank {}: the group failed: {failure:?}", self.rank);
        state.failure = Some(failure.clone());
        state.published = published;
        self.changed.notify_all();
        failure
    }

    /// What is being looked into.
    pub(super) fn suspected(&self) -> Option<SuspectedFailure> {
        self.state().suspected.clone()
    }

    pub(super) fn failure(&self) -> Option<Failure> {
        self.state().failure.clone()
    }

    /// The failure, after waiting for it when there is suspected.
    pub(super) fn root_cause(&self) -> Option<Failure> {
        let mut state = self.state();
        while state.suspected.is_some() && state.failure.is_none() {
            // The watchdog sees to it that this ends.
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.failure.clone()
    }

    /// The failure once there is one, or `None` after `patience`.
    pub(super) fn await_failure(&self, patience: Duration) -> Option<Failure> {
        self.wait_until(deadline_after(patience), |state| state.failure.clone())
    }

    /// An error when the group has failed.
    pub(super) fn check(&self) -> Result<(), Error> {
        self.root_cause().map_or(Ok(()), |failure| Err(failure.into()))
    }

    /// For the heartbeat_monitor: waits until there is something to do, or until `tick` is over.
    pub(super) fn news(&self, tick: Duration) -> News {
        self.wait_until(deadline_after(tick), |state| {
            let news = state.news();
            (news != News::default()).then_some(news)
        })
        .unwrap_or_default()
    }

    /// The other ranks have heard of the failure.
    pub(super) fn set_published(&self) {
        self.state().published = true;
    }

    /// For the watchdog: whether it should end, after `tick` at the latest or when something happens.
    pub(super) fn is_over(&self, tick: Duration) -> bool {
        self.wait_until(deadline_after(tick), |state| {
            (state.over || state.failure.is_some() || state.suspected.is_some()).then_some(())
        });
        self.state().over
    }

    /// Tells the watchdog to end.
    pub(super) fn end(&self) {
        self.state().over = true;
        self.changed.notify_all();
    }

    /// Tells the heartbeat_monitor to say goodbye to the other ranks, and to end.
    pub(super) fn leave(&self) {
        self.state().leaving = true;
        self.changed.notify_all();
    }

    /// Something that others wait for has happened outside of the state.
    pub(super) fn notify(&self) {
        // With the lock, so that nobody is between looking and waiting.
        let _state = self.state();
        self.changed.notify_all();
    }

    /// Waits until `found` finds something or the group is in suspected.
    pub(super) fn wait_for<T>(&self, mut found: impl FnMut() -> Option<T>) -> Result<T, Failure> {
        let mut state = self.state();
        loop {
            if state.suspected.is_some() || state.failure.is_some() {
                drop(state);
                return Err(self.root_cause().unwrap_or_else(|| self.unknown()));
            }
            if let Some(result) = found() {
                return Ok(result);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// `root_cause` always has an answer after suspected; this is for the compiler.
    fn unknown(&self) -> Failure {
        Failure::PeerFailed { peer: self.rank, reason: "the cause is not known".to_string() }
    }

    fn wait_until<T>(&self, deadline: Instant, found: impl Fn(&State) -> Option<T>) -> Option<T> {
        let mut state = self.state();
        loop {
            if let Some(result) = found(&state) {
                return Some(result);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// What the heartbeat_monitor has to do.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct News {
    /// To find out what is behind it.
    pub(super) suspected: Option<SuspectedFailure>,
    /// To tell the other ranks.
    pub(super) unpublished: Option<Failure>,
    /// To leave, with these words.
    pub(super) leaving: Option<ShutdownNotice>,
}

impl State {
    fn shutdown_notice(&self) -> ShutdownNotice {
        let mut shutdown_notice = ShutdownNotice::default();
        for (channel, last) in &self.started {
            match channel {
                Channel::Collectives => shutdown_notice.last = *last,
                Channel::SendTo(peer) => shutdown_notice.messages.entry(*peer).or_default().sent = *last,
                Channel::RecvFrom(peer) => shutdown_notice.messages.entry(*peer).or_default().received = *last,
            }
        }
        shutdown_notice
    }

    fn news(&self) -> News {
        News {
            suspected: self.suspected.clone().filter(|_| self.failure.is_none()),
            unpublished: self.failure.clone().filter(|_| !self.published),
            leaving: self.leaving.then(|| self.shutdown_notice()),
        }
    }
}
