//! How one collective uses the streams of its group.
use super::group::{CollectiveStreams, ShmGroup};
use super::kernels::Source;
use super::slot::Slot;
use super::stream::Inbox;
use crate::arrival::Arrival;
use crate::call::Header;
use crate::panic::lock;
use crate::transport_error::TransportError;
use std::ops::Range;
use std::sync::MutexGuard;
use std::time::Instant;

impl ShmGroup {
    /// The streams of the collectives for one call, whose slots begin with `head`. When the others have come to it goes into
    /// `arrival`.
    pub(crate) fn streams<'a>(
        &'a self,
        head: [u8; Header::BYTES],
        deadline: Instant,
        arrival: &'a Arrival,
    ) -> Streams<'a> {
        let mut streams = lock(&self.collectives);
        streams.calls = streams.calls.wrapping_add(1);
        Streams { shm: self, streams, head, deadline, arrival }
    }
}

/// One call's use of the streams of the collectives. All ranks publish, receive and skip as the call requires, so they
/// agree on the contents of every slot of every stream.
pub(crate) struct Streams<'a> {
    shm: &'a ShmGroup,
    pub(super) streams: MutexGuard<'a, CollectiveStreams>,
    head: [u8; Header::BYTES],
    deadline: Instant,
    arrival: &'a Arrival,
}

impl Streams<'_> {
    pub(crate) fn rank(&self) -> usize {
        self.shm.rank
    }

    pub(crate) fn world_size(&self) -> usize {
        self.shm.world_size
    }

    pub(crate) fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.rank();
        (0..self.world_size()).filter(move |peer| *peer != rank)
    }

    /// The size of each peer's part of a slot in bytes, if a slot has parts.
    pub(crate) fn part(&self) -> usize {
        self.shm.layout.part()
    }

    /// The size of a slot in bytes.
    pub(crate) fn capacity(&self) -> usize {
        self.shm.layout.capacity
    }

    /// Publishes a slot for all peers. `fill` writes its payload and may read the slots that were received last.
    pub(crate) fn publish(
        &mut self,
        fill: impl FnOnce(Slot, Arrived) -> Result<(), TransportError>,
    ) -> Result<(), TransportError> {
        let CollectiveStreams { eventcount, outbox, inboxes, .. } = &mut *self.streams;
        outbox.publish(&self.shm.waiter(eventcount, self.deadline), &self.head, |slot| fill(slot, Arrived(inboxes)))
    }

    /// Waits for the next slot of every peer.
    pub(crate) fn receive_all(&mut self) -> Result<(), TransportError> {
        let CollectiveStreams { eventcount, inboxes, calls, met, .. } = &mut *self.streams;
        let waiter = self.shm.waiter(eventcount, self.deadline);
        for index in 0..inboxes.len() {
            let Some(inbox) = &inboxes[index] else { continue };
            // A peer that is in another call may be the reason why the awaited peer's slot does not come.
            let is_foreign = |inbox: &Inbox| inbox.is_foreign(&self.head);
            let others = &inboxes[index + 1..];
            let futile = || others.iter().flatten().any(is_foreign);
            let came = waiter.wait_unless(inbox.writer, || inbox.has_arrived(), futile)?;
            if std::mem::replace(&mut met[index], *calls) != *calls {
                self.arrival.note(came);
            }
            if !inbox.has_arrived()
                && let Some(foreign) = inboxes[index..].iter_mut().flatten().find(|inbox| is_foreign(inbox))
            {
                return foreign.accept(&self.head);
            }
            if let Some(inbox) = &mut inboxes[index] {
                inbox.accept(&self.head)?;
            }
        }
        Ok(())
    }

    /// The slots that were received last.
    pub(crate) fn arrived(&self) -> Arrived<'_> {
        Arrived(&self.streams.inboxes)
    }

    /// Releases what was received from all peers.
    pub(crate) fn release_all(&mut self) {
        Inbox::release_all(self.streams.inboxes.iter().flatten());
    }

    /// Waits for the next slot of rank `peer`, passes it to `read`, and releases it.
    pub(crate) fn take(
        &mut self,
        peer: usize,
        read: impl FnOnce(Slot) -> Result<(), TransportError>,
    ) -> Result<(), TransportError> {
        let CollectiveStreams { eventcount, inboxes, calls, met, .. } = &mut *self.streams;
        let inbox = inbox_mut(inboxes, peer)?;
        let came = inbox.receive(&self.shm.waiter(eventcount, self.deadline), &self.head)?;
        if std::mem::replace(&mut met[peer], *calls) != *calls {
            self.arrival.note(came);
        }
        read(inbox.slot())?;
        inbox.release();
        Ok(())
    }

    /// The next slots tell of the ranks of other hosts, so that waiting for them is waiting for ranks.
    pub(crate) fn await_others(&mut self) {
        self.streams.calls = self.streams.calls.wrapping_add(1);
    }

    /// All ranks have come: from now on, waiting is for the transport.
    pub(crate) fn all_are_here(&mut self) {
        let CollectiveStreams { calls, met, .. } = &mut *self.streams;
        met.fill(*calls);
    }

    /// Skips the next `count` slots of rank `peer`, which are for others.
    pub(crate) fn skip(&mut self, peer: usize, count: usize) -> Result<(), TransportError> {
        inbox_mut(&mut self.streams.inboxes, peer)?.skip(count);
        Ok(())
    }
}

fn inbox_mut(inboxes: &mut [Option<Inbox>], peer: usize) -> Result<&mut Inbox, TransportError> {
    let inbox = inboxes.get_mut(peer).and_then(Option::as_mut);
    inbox.ok_or_else(|| TransportError::System(format!("there is no shared memory with rank {peer}")))
}

/// The slots that were received last, one from each peer.
#[derive(Clone, Copy)]
pub(crate) struct Arrived<'a>(&'a [Option<Inbox>]);

impl<'a> Arrived<'a> {
    /// The sources of a reduction in rank order: `own` for this rank, and the given part of the slot of every peer.
    pub(crate) fn sources(self, own: Source<'a>, part: impl Fn(usize) -> Range<usize>) -> Vec<Source<'a>> {
        let source = |(rank, inbox): (usize, &'a Option<Inbox>)| match inbox {
            Some(inbox) => Source::Shared(inbox.slot().part(part(rank))),
            None => own,
        };
        self.0.iter().enumerate().map(source).collect()
    }
}
