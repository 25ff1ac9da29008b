//! The state of a group, shared by all threads of one rank: which calls are in flight, and why it failed.
use super::health_store::ShutdownNotice;
use crate::deadline::{deadline_after, deadline_from};
use crate::error::Failure;
use crate::failure::{CallHistory, ExpiredCall, ProgressReport};
use crate::flight_recorder::{CallRecord, Recorded, Recording};
use crate::panic::{lock, wait};
use crate::standing::{Membership, Thread, Wait};
use crate::wait::wait_until;
use crate::{Call, Channel};
use candle_ddp_base::debug_fields;
use rustix::thread::Pid;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, Weak};
use std::time::{Duration, Instant};

/// Tells whether a call in flight is complete.
pub trait Fence: Send + Sync {
    /// An error is one of the device, after which nothing runs on it.
    fn is_over(&self) -> Result<bool, String>;

    /// Its place among what the program's stream waits for.
    fn order(&self) -> Order {
        Order::default()
    }
}

/// The place of a call among what the program's stream on the device waits for. These waits are [numbered](DeviceGroup::number) in their order.
#[derive(Clone, Copy, Debug, Default)]
pub struct Order {
    /// The call runs behind all waits up to this number.
    pub behind: u64,
    /// The number of the stream's wait for the call itself: whatever the program puts on the stream later runs behind the call.
    pub awaited: Option<u64>,
}

/// One group on devices, as seen by one of its ranks.
pub struct DeviceGroup {
    /// This rank.
    pub rank: usize,
    /// The number of ranks.
    pub world_size: usize,
    /// How long a call may take.
    pub timeout: Duration,
    /// For the flight recorder, if there is one.
    pub recording: Option<Recording>,
    /// Its place in its job, and the threads that the rank did not know when the group got it.
    pub(super) place: OnceLock<(Membership, Option<Vec<Pid>>)>,
    /// The threads that wait for calls.
    pub(super) waits: Mutex<Vec<Wait>>,
    state: Mutex<State>,
    changed: Condvar,
}

pub(super) struct State {
    /// A suspected failure, whose root cause is being searched.
    suspected: Option<SuspectedFailure>,
    pub(super) failure: Option<Failure>,
    /// Whether the other ranks know of the failure, or this rank learned of it from them.
    published: bool,
    pub(super) collectives: CallHistory,
    /// The messages of each channel.
    pub(super) messages: HashMap<Channel, CallHistory>,
    /// How many calls of each channel the flight recorder wants.
    recorded: usize,
    pub(super) outstanding: Vec<Outstanding>,
    /// The threads that have made calls.
    pub(super) callers: Vec<Arc<Thread>>,
    /// The number of the last wait of the program's stream, for each thread that is about to start a call behind that.
    pub(super) preparing: Vec<u64>,
    /// Whether this rank wants to know where all ranks stand.
    pub(super) asks: bool,
    /// The answers.
    pub(super) answers: Option<Vec<Vec<u8>>>,
    /// When the device was last asked which calls are complete.
    swept: Instant,
    /// Whether this rank is about to leave in good order.
    pub(super) leaving: bool,
    /// Whether the watchdog and the poller should end.
    over: bool,
}

pub(super) struct Outstanding {
    pub(super) channel: Channel,
    pub(super) sequence: u64,
    pub(super) call: Call,
    deadline: Instant,
    pub(super) fence: Arc<dyn Fence>,
    /// Whether it is a message that later collectives wait for.
    pub(super) is_of_batch: bool,
}

impl Outstanding {
    /// The channel whose stream the call runs on.
    pub(super) fn stream(&self) -> Channel {
        if self.is_of_batch { Channel::Collectives } else { self.channel }
    }
}

/// A failure that the watchdog has noticed, before the root cause is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SuspectedFailure {
    /// The engine's library or the device reported an error.
    Broken(String),
    /// A call has not completed in time.
    Expired { channel: Channel, sequence: u64, call: Call },
}

debug_fields!(DeviceGroup: rank, world_size);

impl DeviceGroup {
    /// A group without calls.
    pub fn new(rank: usize, world_size: usize, timeout: Duration, recording: Option<Recording>) -> Arc<Self> {
        let recorded = recording.as_ref().map_or(0, |recording| recording.recorder.entries());
        let (state, changed) = (Mutex::new(State::new(recorded)), Condvar::new());
        let (place, waits) = (OnceLock::new(), Mutex::default());
        let group = Arc::new(Self { rank, world_size, timeout, recording, place, waits, state, changed });
        if let Some(recording) = &group.recording {
            let group: Weak<Self> = Arc::downgrade(&group);
            recording.register(group);
        }
        group
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Records that `call` is about to be started, with the fence that tells when it is complete. Returns its sequence
    /// number.
    pub fn begin(&self, channel: Channel, call: Call, fence: Arc<dyn Fence>) -> Result<u64, Failure> {
        self.begin_as(channel, call, fence, false)
    }

    /// Like [`begin`](Self::begin), for the calls of one kernel on the stream of the collectives: a collective, or the messages of a
    /// batch.
    pub fn begin_together(&self, calls: &[(Call, Channel)], fence: &Arc<dyn Fence>) -> Result<(), Failure> {
        calls.iter().try_for_each(|(call, channel)| {
            self.begin_as(*channel, *call, Arc::clone(fence), *channel != Channel::Collectives).map(drop)
        })
    }

    fn begin_as(&self, channel: Channel, call: Call, fence: Arc<dyn Fence>, is_of_batch: bool) -> Result<u64, Failure> {
        self.check()?;
        let mut state = self.state();
        Thread::enter(&mut state.callers);
        let history = state.history_mut(channel);
        let sequence = history.started() + 1;
        // On a stream, calls begin in the order in which they are started.
        let now = Instant::now();
        history.start(sequence, call, Some(now));
        history.begin(sequence, Some(now));
        let deadline = deadline_from(now, self.timeout);
        state.outstanding.push(Outstanding { channel, sequence, call, deadline, fence, is_of_batch });
        Ok(sequence)
    }

    /// Forgets completed calls. Returns an error of the device, or else the first call that has expired.
    ///
    /// The device is asked, and fences are dropped, without the lock: the driver may hold up the question, or the end of an event, for
    /// as long as another thread waits in it.
    pub(super) fn sweep(&self, now: Instant) -> Option<SuspectedFailure> {
        let calls: Vec<_> = {
            let state = self.state();
            let known = |call: &Outstanding| (call.stream(), call.channel, call.sequence, Arc::clone(&call.fence));
            state.outstanding.iter().map(known).collect()
        };
        let (mut over, mut passed, mut broken) = (HashSet::new(), HashSet::new(), None);
        // If a call is over, so are those before it on its stream.
        for (stream, channel, sequence, fence) in calls.into_iter().rev() {
            if !passed.contains(&stream) {
                match fence.is_over() {
                    Ok(true) => passed.insert(stream),
                    Ok(false) => continue,
                    Err(reason) => {
                        broken = Some(SuspectedFailure::Broken(reason));
                        continue;
                    }
                };
            }
            over.insert((channel, sequence));
        }
        let mut state = self.state();
        let ended: Vec<Outstanding> =
            state.outstanding.extract_if(.., |call| over.contains(&(call.channel, call.sequence))).collect();
        for (channel, sequence) in over {
            state.history_mut(channel).complete(sequence, true, Some(now));
        }
        if state.outstanding.is_empty() {
            self.changed.notify_all();
        }
        state.swept = Instant::now();
        let found = broken.or_else(|| state.expired(now));
        drop(state);
        drop(ended);
        found
    }

    /// The first call that has expired, if nothing has asked the device for `patience`: the driver holds up the question.
    pub(super) fn expired_unseen(&self, now: Instant, patience: Duration) -> Option<SuspectedFailure> {
        let state = self.state();
        let expired = state.expired(now).filter(|_| now.saturating_duration_since(state.swept) >= patience)?;
        log::warn!("rank {}: the driver of the device has not answered for {patience:?}", self.rank);
        Some(expired)
    }

    /// Waits until no call is in flight. Returns the failure if that comes first. Every call has a deadline.
    pub fn drain(&self) -> Option<Failure> {
        let _waiting = self.waiting_for_all();
        let mut state = self.state();
        while state.failure.is_none() && !state.outstanding.is_empty() {
            state = wait(&self.changed, state);
        }
        state.failure.clone()
    }

    /// Whether any call is in flight, as far as known without asking the device.
    pub fn is_busy(&self) -> bool {
        !self.state().outstanding.is_empty()
    }

    /// The first collective in flight that lacks a rank that left after number `last`.
    pub(super) fn missed_by(&self, last: u64) -> Option<(u64, Call)> {
        let state = self.state();
        let collectives = state.outstanding.iter().filter(|call| call.channel == Channel::Collectives);
        collectives.filter(|call| call.sequence > last).map(|call| (call.sequence, call.call)).min_by_key(|call| call.0)
    }

    /// The messages in flight: their channels, numbers and calls.
    pub(super) fn messages(&self) -> Vec<(Channel, u64, Call)> {
        let state = self.state();
        let messages = state.outstanding.iter().filter(|call| call.channel != Channel::Collectives);
        messages.map(|call| (call.channel, call.sequence, call.call)).collect()
    }

    /// The progress of the collectives. Those behind a batch have not begun.
    pub(super) fn progress_report(&self) -> ProgressReport {
        let state = self.state();
        let mut report = state.collectives.report(false);
        let mut behind_batch = state.outstanding.iter().skip_while(|call| !call.is_of_batch);
        if let Some(call) = behind_batch.find(|call| call.channel == Channel::Collectives) {
            report.begun = call.sequence - 1;
        }
        report
    }

    /// The ranks whose messages end together with this one, as in a batch.
    pub(super) fn partners(&self, channel: Channel, sequence: u64) -> Vec<usize> {
        let state = self.state();
        let mut all = state.outstanding.iter();
        let Some(own) = all.find(|call| (call.channel, call.sequence) == (channel, sequence)) else {
            return Vec::new();
        };
        let together = state.outstanding.iter().filter(|call| Arc::ptr_eq(&call.fence, &own.fence));
        let peers = together.filter_map(|call| match call.channel {
            Channel::Collectives => None,
            Channel::SendTo(peer) | Channel::RecvFrom(peer) => Some(peer),
        });
        peers.collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// An expired call of this rank, for the diagnosis.
    pub(super) fn expired(&self, channel: Channel, sequence: u64, call: Call) -> ExpiredCall<'static> {
        let Self { rank, timeout, .. } = *self;
        ExpiredCall { rank, timeout, channel, sequence, call, awaited: None }
    }

    /// Records a suspected failure: from now on no call counts as successful until the failure is known.
    pub fn suspect(&self, suspected: SuspectedFailure) {
        let mut state = self.state();
        if state.failure.is_none() && state.suspected.is_none() {
            log::debug!("rank {}: {suspected:?}", self.rank);
            state.suspected = Some(suspected);
            self.changed.notify_all();
        }
    }

    /// Ends the group with `failure`, unless it already has one; returns the first one.
    pub fn fail(&self, failure: Failure) -> Failure {
        self.set_failure(failure, false)
    }

    /// Like `fail`, with a failure that the other ranks already know.
    pub(super) fn fail_as_published(&self, failure: Failure) -> Failure {
        self.set_failure(failure, true)
    }

    fn set_failure(&self, failure: Failure, published: bool) -> Failure {
        if let Some((membership, _)) = self.place.get() {
            membership.pass_on(&failure);
        }
        let mut state = self.state();
        if let Some(first) = &state.failure {
            return first.clone();
        }
        log::debug!("rank {}: the group failed: {failure:?}", self.rank);
        state.failure = Some(failure.clone());
        state.published = published;
        self.changed.notify_all();
        drop(state);
        if let Some(Recording { recorder, .. }) = &self.recording {
            recorder.write_because(&failure.to_string());
        }
        failure
    }

    /// The suspected failure whose root cause is being searched.
    pub(super) fn suspected(&self) -> Option<SuspectedFailure> {
        self.state().suspected.clone()
    }

    /// The reason why the group has failed.
    pub fn failure(&self) -> Option<Failure> {
        self.state().failure.clone()
    }

    /// Returns the failure. If one is suspected, waits until its root cause is known.
    pub fn root_cause(&self) -> Option<Failure> {
        let mut state = self.state();
        while state.suspected.is_some() && state.failure.is_none() {
            // The watchdog ensures that this ends.
            state = wait(&self.changed, state);
        }
        state.failure.clone()
    }

    /// The failure once there is one, or `None` after `patience`.
    pub(super) fn await_failure(&self, patience: Duration) -> Option<Failure> {
        self.wait_until(deadline_after(patience), |state| state.failure.clone())
    }

    /// Returns an error, for the program, if the group has failed.
    pub fn check(&self) -> Result<(), Failure> {
        let Some(failure) = self.root_cause() else { return Ok(()) };
        if let Some((membership, _)) = self.place.get() {
            membership.tell();
        }
        Err(failure)
    }

    /// For the heartbeat monitor: waits until there is something to do, at most for `tick`.
    pub(super) fn news(&self, tick: Duration) -> News {
        self.wait_until(deadline_after(tick), |state| {
            let news = state.news();
            (news != News::default()).then_some(news)
        })
        .unwrap_or_default()
    }

    /// Records that the other ranks know of the failure.
    pub(super) fn set_published(&self) {
        self.state().published = true;
    }

    /// For the watchdog and the poller: whether they should end. Waits until something happens, at most for `tick`.
    pub(super) fn is_over(&self, tick: Duration) -> bool {
        self.wait_until(deadline_after(tick), |state| {
            (state.over || state.failure.is_some() || state.suspected.is_some()).then_some(())
        });
        self.state().over
    }

    /// Tells the watchdog and the poller to end.
    pub fn end(&self) {
        self.state().over = true;
        self.changed.notify_all();
    }

    /// Makes the heartbeat monitor tell the other ranks that this one leaves, and end.
    pub fn leave(&self) {
        self.state().leaving = true;
        self.changed.notify_all();
    }

    /// Wakes all waiting threads because something they wait for has happened outside the state.
    pub fn notify(&self) {
        // Takes the lock, so that no thread is between checking and waiting.
        let _state = self.state();
        self.changed.notify_all();
    }

    /// Waits until `found` returns something. Returns an error if the group has failed or fails first.
    pub fn wait_for<T>(&self, mut found: impl FnMut() -> Option<T>) -> Result<T, Failure> {
        let mut state = self.state();
        loop {
            if state.suspected.is_some() || state.failure.is_some() {
                drop(state);
                self.check()?;
                return Err(self.unknown());
            }
            if let Some(result) = found() {
                return Ok(result);
            }
            state = wait(&self.changed, state);
        }
    }

    /// Not reached, since `root_cause` always has an answer while a failure is suspected.
    fn unknown(&self) -> Failure {
        Failure::PeerFailed { peer: self.rank, reason: "the cause is not known".to_string() }
    }

    pub(super) fn wait_until<T>(&self, deadline: Instant, found: impl FnMut(&mut State) -> Option<T>) -> Option<T> {
        wait_until(&self.state, &self.changed, deadline, found)
    }
}

/// The tasks of the heartbeat monitor.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct News {
    /// The suspected failure whose root cause it must find.
    pub(super) suspected: Option<SuspectedFailure>,
    /// The failure that it must tell the other ranks.
    pub(super) unpublished: Option<Failure>,
    /// The notice with which it must leave.
    pub(super) leaving: Option<ShutdownNotice>,
    /// Whether it must ask where all ranks stand.
    pub(super) asks: bool,
}

impl State {
    fn new(recorded: usize) -> Self {
        Self {
            suspected: None,
            failure: None,
            published: false,
            collectives: CallHistory::new(recorded),
            messages: HashMap::new(),
            recorded,
            outstanding: Vec::new(),
            callers: Vec::new(),
            preparing: Vec::new(),
            asks: false,
            answers: None,
            swept: Instant::now(),
            leaving: false,
            over: false,
        }
    }

    /// The first call whose deadline has passed.
    fn expired(&self, now: Instant) -> Option<SuspectedFailure> {
        let Outstanding { channel, sequence, call, .. } = *self.outstanding.iter().find(|call| call.deadline <= now)?;
        Some(SuspectedFailure::Expired { channel, sequence, call })
    }

    fn history_mut(&mut self, channel: Channel) -> &mut CallHistory {
        match channel {
            Channel::Collectives => &mut self.collectives,
            message => self.messages.entry(message).or_insert_with(|| CallHistory::new(self.recorded)),
        }
    }

    fn shutdown_notice(&self) -> ShutdownNotice {
        let mut shutdown_notice = ShutdownNotice { last: self.collectives.started(), ..ShutdownNotice::default() };
        for (channel, history) in &self.messages {
            match channel {
                Channel::Collectives => {}
                Channel::SendTo(peer) => shutdown_notice.messages.entry(*peer).or_default().sent = history.started(),
                Channel::RecvFrom(peer) => {
                    shutdown_notice.messages.entry(*peer).or_default().received = history.started();
                }
            }
        }
        shutdown_notice
    }

    fn news(&self) -> News {
        News {
            suspected: self.suspected.clone().filter(|_| self.failure.is_none()),
            unpublished: self.failure.clone().filter(|_| !self.published),
            leaving: self.leaving.then(|| self.shutdown_notice()),
            asks: self.asks,
        }
    }
}

impl Recorded for DeviceGroup {
    fn record(&self) -> (Vec<CallRecord>, Option<String>) {
        let state = self.state();
        let mut calls: Vec<CallRecord> = state.collectives.records(Channel::Collectives).collect();
        for (channel, history) in &state.messages {
            calls.extend(history.records(*channel));
        }
        (calls, state.failure.as_ref().map(Failure::to_string))
    }
}
