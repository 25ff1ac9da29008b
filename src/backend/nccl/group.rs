//! What all threads of one rank know about their group: which calls are under way, and why it failed.
use super::health_store::ShutdownNotice;
use super::lock;
use crate::Error;
use crate::backend::call::{Call, Channel};
use crate::backend::failure::{CallHistory, ExpiredCall, ProgressReport};
use crate::deadline::deadline_after;
use crate::error::Failure;
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How a call under way tells that it is over.
pub(super) trait Fence: Send + Sync {
    /// An error is one of the device, after which nothing runs on it any more.
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
    /// Something is wrong, and its root cause is being looked for.
    suspected: Option<SuspectedFailure>,
    failure: Option<Failure>,
    /// The other ranks know of the failure, or this rank heard of it from them.
    published: bool,
    collectives: CallHistory,
    /// The sequence number of the last call on each channel.
    started: HashMap<Channel, u64>,
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

/// What the watchdog has noticed, before its root cause is known.
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

    /// Notes that `call` is about to be started, with the fence that tells when it is over. Returns its sequence number.
    pub(super) fn begin(&self, channel: Channel, call: Call, fence: Arc<dyn Fence>) -> Result<u64, Failure> {
        if let Some(failure) = self.root_cause() {
            return Err(failure);
        }
        let mut state = self.state();
        let sequence = state.started.get(&channel).map_or(1, |last| last + 1);
        state.started.insert(channel, sequence);
        if channel == Channel::Collectives {
            // On a stream, calls begin in the order in which they are started.
            state.collectives.start(sequence, call);
            state.collectives.begin(sequence);
        }
        let deadline = deadline_after(self.timeout);
        state.outstanding.push(Outstanding { channel, sequence, call, deadline, fence });
        Ok(sequence)
    }

    /// Forgets calls that are over. Returns an error of the device, or else the first call that has expired.
    pub(super) fn sweep(&self, now: Instant) -> Option<SuspectedFailure> {
        let mut state = self.state();
        let State { outstanding, .. } = &mut *state;
        let mut broken = None;
        outstanding.retain(|call| match call.fence.is_over() {
            Ok(is_over) => !is_over,
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

    /// Waits until no call is under way. Returns the failure if that comes first. Every call has its deadline.
    pub(super) fn drain(&self) -> Option<Failure> {
        let mut state = self.state();
        while state.failure.is_none() && !state.outstanding.is_empty() {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.failure.clone()
    }

    /// Whether any call is under way, as far as is known without asking the device.
    pub(super) fn is_busy(&self) -> bool {
        !self.state().outstanding.is_empty()
    }

    /// The first collective under way in which a rank that left after number `last` is missing.
    pub(super) fn missed_by(&self, last: u64) -> Option<(u64, Call)> {
        let state = self.state();
        let collectives = state.outstanding.iter().filter(|call| call.channel == Channel::Collectives);
        collectives.filter(|call| call.sequence > last).map(|call| (call.sequence, call.call)).min_by_key(|call| call.0)
    }

    /// The messages that are under way: their channels, numbers and calls.
    pub(super) fn messages(&self) -> Vec<(Channel, u64, Call)> {
        let state = self.state();
        let messages = state.outstanding.iter().filter(|call| call.channel != Channel::Collectives);
        messages.map(|call| (call.channel, call.sequence, call.call)).collect()
    }

    pub(super) fn progress_report(&self) -> ProgressReport {
        self.state().collectives.report(false)
    }

    /// A call of this rank's that has expired, to be diagnosed.
    pub(super) fn expired(&self, channel: Channel, sequence: u64, call: Call) -> ExpiredCall<'static> {
        let Self { rank, timeout, .. } = *self;
        ExpiredCall { rank, timeout, channel, sequence, call, awaited: None }
    }

    /// Notes that something is wrong: from now on no call counts as successful until the failure is known.
    pub(super) fn suspect(&self, suspected: SuspectedFailure) {
        let mut state = self.state();
        if state.failure.is_none() && state.suspected.is_none() {
            log::debug!("rank {}: {suspected:?}", self.rank);
            state.suspected = Some(suspected);
            self.changed.notify_all();
        }
    }

    /// Ends the group with `failure`, unless it has one already; returns the first one.
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

    /// The suspected failure whose root cause is being looked for.
    pub(super) fn suspected(&self) -> Option<SuspectedFailure> {
        self.state().suspected.clone()
    }

    pub(super) fn failure(&self) -> Option<Failure> {
        self.state().failure.clone()
    }

    /// The failure. While one is suspected, this waits until its root cause is known.
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

    /// For the heartbeat monitor: waits until there is something to do, or until `tick` is over.
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

    /// Tells the heartbeat monitor to say goodbye to the other ranks, and to end.
    pub(super) fn leave(&self) {
        self.state().leaving = true;
        self.changed.notify_all();
    }

    /// Wakes all waiting threads because something they wait for has happened outside the state.
    pub(super) fn notify(&self) {
        // With the lock, so that nobody is between looking and waiting.
        let _state = self.state();
        self.changed.notify_all();
    }

    /// Waits until `found` finds something. An error if the group has failed, or fails before.
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

    /// Never used, since `root_cause` always has an answer while a failure is suspected.
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

/// What the heartbeat monitor has to do.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct News {
    /// Whose root cause it has to find.
    pub(super) suspected: Option<SuspectedFailure>,
    /// What it has to tell the other ranks.
    pub(super) unpublished: Option<Failure>,
    /// The notice with which it has to leave.
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
