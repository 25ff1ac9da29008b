//! A group as a member of its job, whose ranks ask each other through the store where they stand.
use super::group::{DeviceGroup, Fence, Outstanding, State};
use crate::deadline::deadline_after;
use crate::error::Failure;
use crate::failure::CallHistory;
use crate::panic::lock;
use crate::standing::{GroupReport, Lane, Member, Membership, StreamWait, Thread, Waiting, may_call, strangers};
use crate::{Call, Channel, Result};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// How long the watch waits for the answers. The heartbeat monitor gives up a little earlier.
const PATIENCE: Duration = Duration::from_secs(4);

/// The number of the last wait of the program's stream.
static NUMBER: AtomicU64 = AtomicU64::new(0);

impl Member for DeviceGroup {
    fn world_size(&self) -> usize {
        self.world_size
    }

    fn is_over(&self) -> bool {
        let state = self.state();
        state.failure.is_some() || state.leaving
    }

    fn stand(&self, id: u64, name: &str) -> (GroupReport, Vec<Arc<Thread>>) {
        let waits = lock(&self.waits).clone();
        let state = self.state();
        let messages = state.messages.iter().map(|(channel, history)| (*channel, history));
        let lanes: Vec<Lane> = std::iter::once((Channel::Collectives, &state.collectives))
            .chain(messages)
            .filter(|(_, history)| history.started() > 0)
            .map(|(channel, history)| lane(&state, channel, history))
            .collect();
        let stream_waits = state.outstanding.iter().filter(|call| !call.is_of_batch).filter_map(|call| {
            let number = call.fence.order().awaited?;
            Some(StreamWait { channel: call.channel, sequence: call.sequence, number })
        });
        let stream_waits = stream_waits.collect();
        let next = Some(state.preparing.iter().copied().min().unwrap_or(u64::MAX));
        let (is_open, helpers) =
            may_call(&state.callers, self.place.get().and_then(|(_, strangers)| strangers.as_deref()));
        let (name, rank) = (name.to_string(), self.rank);
        (GroupReport { id, name, rank, is_open, helpers, lanes, waits, next, stream_waits }, state.callers.clone())
    }

    fn ask(&self) -> Vec<Vec<u8>> {
        self.state().asks = true;
        self.notify();
        let answers = self.wait_until(deadline_after(PATIENCE), |state| {
            let is_over = state.failure.is_some() || state.leaving;
            state.answers.take().or_else(|| is_over.then(Vec::new))
        });
        let mut state = self.state();
        (state.asks, state.answers) = (false, None);
        answers.unwrap_or_default()
    }

    fn end(&self, failure: Failure) {
        self.fail(failure);
    }
}

/// How far a channel is. A batch ends when all of its messages do, about which a single lane says nothing.
fn lane(state: &State, channel: Channel, history: &CallHistory) -> Lane {
    let first = state.outstanding.iter().find(|call| call.channel == channel || call.stream() == channel);
    let first = first.filter(|call| !call.is_of_batch && !is_empty(&call.call));
    Lane {
        channel,
        started: history.started(),
        running: first.map(|call| (call.sequence, call.call)),
        behind: first.map_or(0, |call| call.fence.order().behind),
        // Its data may be on its way.
        needs_receiver: false,
    }
}

/// Whether no data is sent, so that the call waits for nobody.
fn is_empty(call: &Call) -> bool {
    call.element.is_some() && call.count == 0
}

/// A thread that is about to start a call.
#[derive(Debug)]
#[must_use]
pub struct Preparing<'a> {
    group: &'a DeviceGroup,
    /// The call runs behind everything that the program's stream waits for up to this number.
    pub behind: u64,
}

impl Drop for Preparing<'_> {
    fn drop(&mut self) {
        let mut state = self.group.state();
        if let Some(at) = state.preparing.iter().position(|behind| *behind == self.behind) {
            state.preparing.swap_remove(at);
        }
    }
}

impl DeviceGroup {
    /// Gives the group its place in its job.
    pub fn enter_job(self: &Arc<Self>, membership: &Membership) -> Result<()> {
        let member: Weak<Self> = Arc::downgrade(self);
        match self.place.set((membership.clone(), strangers())) {
            Ok(()) => membership.enter(member),
            Err(_) => Ok(()),
        }
    }

    /// Removes the group, which this rank leaves, from its job.
    pub fn leave_job(self: &Arc<Self>) {
        let callers = self.state().callers.clone();
        let member: Weak<dyn Member> = Arc::downgrade(self) as Weak<Self>;
        if let Some((membership, _)) = self.place.get() {
            membership.leave(&member, callers);
        }
    }

    /// Where this rank stands in all groups of its job.
    pub(super) fn report(&self) -> Vec<u8> {
        self.place.get().map(|(membership, _)| membership.report()).unwrap_or_default()
    }

    /// For the heartbeat monitor: answers where all ranks stand.
    pub(super) fn answer(&self, answers: Vec<Vec<u8>>) {
        let mut state = self.state();
        if std::mem::take(&mut state.asks) {
            state.answers = Some(answers);
        }
        drop(state);
        self.notify();
    }

    /// The next number of a wait of the program's stream. The wait must be on the stream already.
    pub fn number() -> u64 {
        NUMBER.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Call before the program's stream is marked for a call that is about to be started.
    pub fn prepare(&self) -> Preparing<'_> {
        let mut state = self.state();
        let behind = NUMBER.load(Ordering::SeqCst);
        state.preparing.push(behind);
        Preparing { group: self, behind }
    }

    /// Waits until fewer than `most` calls are on the stream of the collectives. The driver would wait too once that is full, and
    /// holds up the thread that ends the group then: this rank's own wait ends if the group fails.
    pub fn await_room(&self, most: usize) -> Result<(), Failure> {
        const PAUSE: Duration = Duration::from_micros(50);
        let on_stream = |call: &&Outstanding| call.stream() == Channel::Collectives;
        let state = self.state();
        let last = state.outstanding.iter().rev().filter(on_stream).nth(most.saturating_sub(1));
        let Some(last) = last else { return Ok(()) };
        let (fence, channel, sequence) = (Arc::clone(&last.fence), last.channel, last.sequence);
        drop(state);
        let _waiting = Waiting::new(&self.waits, channel, sequence, true);
        // After an error of the device, the watchdog ends the group.
        while !matches!(fence.is_over(), Ok(true)) {
            self.check()?;
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// While the result lives, the calling thread waits for the call with this fence: until it is over or, unless the thread `is_held`,
    /// only until it is launched. Then the thread lets the program's stream wait for it before it starts another call.
    pub fn waiting(&self, fence: &dyn Fence, is_held: bool) -> Option<Waiting<'_>> {
        let state = self.state();
        let call = state.outstanding.iter().find(|call| std::ptr::addr_eq(Arc::as_ptr(&call.fence), fence))?;
        let (channel, sequence) = (call.channel, call.sequence);
        drop(state);
        Some(Waiting::new(&self.waits, channel, sequence, is_held))
    }

    /// While the result lives, the calling thread waits for all calls in flight.
    pub(super) fn waiting_for_all(&self) -> Vec<Waiting<'_>> {
        let state = self.state();
        let last: HashMap<_, _> = state.outstanding.iter().map(|call| (call.channel, call.sequence)).collect();
        drop(state);
        last.into_iter().map(|(channel, sequence)| Waiting::new(&self.waits, channel, sequence, true)).collect()
    }
}
