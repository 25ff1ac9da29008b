//! A group as a member of its job.
use crate::call::{Call, Channel};
use crate::error::Failure;
use crate::group::Group;
use crate::panic::lock;
use crate::question::Question;
use crate::standing::{GroupReport, Lane, Member, Membership, Thread, Wait, Waiting, may_call};
use std::sync::{Arc, Weak};

impl Member for Group {
    fn world_size(&self) -> usize {
        self.world_size
    }

    fn is_over(&self) -> bool {
        let state = lock(&self.state);
        state.failure.is_some() || state.leaving
    }

    fn stand(&self, id: u64, name: &str) -> (GroupReport, Vec<Arc<Thread>>) {
        let mut waits = lock(&self.waits).clone();
        let state = lock(&self.state);
        let mut lanes = Vec::new();
        for channel in state.channels() {
            let history = state.history(channel);
            if history.started() == 0 {
                continue;
            }
            let running = history.running().and_then(|sequence| Some((sequence, history.call_at(sequence)?)));
            if let Some((sequence, _)) = running {
                let (thread, place) = history.runner();
                waits.push(Wait { thread, channel, sequence, place, is_held: true });
            }
            let needs_receiver = running.is_some_and(|(_, call)| self.needs_receiver(channel, &call));
            lanes.push(Lane { channel, started: history.started(), running, behind: 0, needs_receiver });
        }
        let (is_open, helpers) = may_call(&state.callers, self.strangers.as_deref());
        let (name, rank, next, stream_waits) = (name.to_string(), self.rank, None, Vec::new());
        (GroupReport { id, name, rank, is_open, helpers, lanes, waits, next, stream_waits }, state.callers.clone())
    }

    fn ask(&self) -> Vec<Vec<u8>> {
        self.put(Question::Standing).into_iter().flatten().collect()
    }

    fn end(&self, failure: Failure) {
        self.fail(failure);
    }
}

impl Group {
    /// Whether a call is a message that does not fit into the shared memory, so that it cannot end before its receiver has come.
    fn needs_receiver(&self, channel: Channel, call: &Call) -> bool {
        let (Channel::SendTo(peer), Some(shm), Some(element)) = (channel, &self.shm, call.element) else {
            return false;
        };
        let bytes = usize::try_from(call.count).unwrap_or(usize::MAX).saturating_mul(element.size());
        self.hosts.member(peer).is_some() && !shm.holds_message(bytes)
    }

    /// While the result lives, the calling thread waits until call number `sequence` of `channel` is over, which another thread runs.
    pub(crate) fn waiting(&self, channel: Channel, sequence: u64) -> Waiting<'_> {
        Waiting::new(&self.waits, channel, sequence, true)
    }

    /// Lists the group in its job.
    pub(crate) fn enter_job(self: &Arc<Self>) -> crate::Result<()> {
        let member: Weak<Self> = Arc::downgrade(self);
        self.membership.as_ref().map_or(Ok(()), |membership| membership.enter(member))
    }

    /// Removes the group, which this rank leaves, from its job.
    pub(crate) fn leave_job(self: &Arc<Self>) {
        let callers = lock(&self.state).callers.clone();
        let member: Weak<dyn Member> = Arc::downgrade(self) as Weak<Self>;
        self.membership.iter().for_each(|membership: &Membership| membership.leave(&member, callers.clone()));
    }
}
