//! A stream of slots from one rank to others, through a ring in the writer's segment.
//!
//! Slots are numbered from 0, and slot `n` is at index `n` modulo the ring's length. The stamp of slot `n` is `n + 1`,
//! written last and with release order; a reader that sees it, with acquire order, sees the header and the payload. A
//! reader counts the slots that it has passed in a word of its own segment, with release order, and the writer reuses a
//! slot once all readers have passed it. Numbers wrap; differences do not.
use super::eventcount::{Eventcount, Waiter};
use super::layout::Ring;
use super::segment::Segment;
use super::slot::Slot;
use super::sync::{Ordering, fence};
use crate::call::Header;
use crate::transport_error::TransportError;
use std::sync::Arc;
use std::time::Instant;

/// The writer's end.
pub(crate) struct Outbox {
    pub(super) rank: usize,
    pub(super) ring: Ring,
    pub(super) segment: Arc<Segment>,
    pub(super) readers: Vec<Reader>,
    /// The number of the next slot.
    pub(super) position: u32,
}

/// A reader, as the writer sees it.
pub(super) struct Reader {
    pub(super) rank: usize,
    pub(super) eventcount: Eventcount,
    pub(super) segment: Arc<Segment>,
    /// The offset in its segment of its count of passed slots.
    pub(super) passed: usize,
    /// The count as it was read when it was last needed.
    pub(super) seen: u32,
}

/// A reader's end.
pub(crate) struct Inbox {
    pub(super) rank: usize,
    pub(super) writer: usize,
    pub(super) ring: Ring,
    pub(super) segment: Arc<Segment>,
    /// The reader's own segment.
    pub(super) own: Arc<Segment>,
    pub(super) passed: usize,
    pub(super) writer_eventcount: Eventcount,
    /// The number of the next slot.
    pub(super) position: u32,
}

/// The words of an encoded header, which follow the stamp.
fn words(header: &[u8; Header::BYTES]) -> impl Iterator<Item = u32> + '_ {
    header.as_chunks::<4>().0.iter().map(|word| u32::from_ne_bytes(*word))
}

impl Outbox {
    /// Publishes a slot whose payload `fill` writes.
    pub(super) fn publish(
        &mut self,
        waiter: &Waiter,
        header: &[u8; Header::BYTES],
        fill: impl FnOnce(Slot) -> Result<(), TransportError>,
    ) -> Result<(), TransportError> {
        let (position, slots) = (self.position, self.ring.slots as u32);
        for reader in &mut self.readers {
            // A reader may be ahead: it passes slots for others before they are written.
            let is_free = |passed: u32| (position.wrapping_sub(passed) as i32) < slots as i32;
            if !is_free(reader.seen) {
                let passed = reader.segment.word(reader.passed);
                waiter.wait(reader.rank, || is_free(passed.load(Ordering::Acquire)))?;
                reader.seen = passed.load(Ordering::Acquire);
            }
        }
        let line = self.ring.line(position);
        for (index, word) in words(header).enumerate() {
            self.segment.word(line + 4 + 4 * index).store(word, Ordering::Relaxed);
        }
        fill(Slot::new(&self.segment, self.ring.slot(position)))?;
        self.position = position.wrapping_add(1);
        self.segment.word(line).store(self.position, Ordering::Release);
        fence(Ordering::SeqCst);
        for reader in &self.readers {
            reader.eventcount.ring_if_awaited(self.rank);
        }
        Ok(())
    }
}

impl Inbox {
    /// Waits for the next slot, and checks that it belongs to the same call. It stays valid until
    /// [`release`](Self::release). The result is when it came, unless it was there at once.
    pub(super) fn receive(
        &mut self,
        waiter: &Waiter,
        expected: &[u8; Header::BYTES],
    ) -> Result<Option<Instant>, TransportError> {
        let came = waiter.wait(self.writer, || self.has_arrived())?;
        self.accept(expected)?;
        Ok(came)
    }

    /// Whether the next slot has arrived.
    pub(super) fn has_arrived(&self) -> bool {
        self.segment.word(self.ring.line(self.position)).load(Ordering::Acquire) == self.position.wrapping_add(1)
    }

    /// Whether the next slot has arrived and belongs to another call.
    pub(super) fn is_foreign(&self, expected: &[u8; Header::BYTES]) -> bool {
        self.has_arrived() && !Header::agree(expected, &self.header())
    }

    /// Takes the next slot, which must have arrived.
    pub(super) fn accept(&mut self, expected: &[u8; Header::BYTES]) -> Result<(), TransportError> {
        let received = self.header();
        if !Header::agree(expected, &received) {
            return Err(TransportError::Header { peer: self.writer, received });
        }
        self.position = self.position.wrapping_add(1);
        Ok(())
    }

    fn header(&self) -> [u8; Header::BYTES] {
        let (line, mut header) = (self.ring.line(self.position), [0; Header::BYTES]);
        for (index, bytes) in header.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            *bytes = self.segment.word(line + 4 + 4 * index).load(Ordering::Relaxed).to_ne_bytes();
        }
        header
    }

    /// The slot that was received last.
    pub(super) fn slot(&self) -> Slot<'_> {
        Slot::new(&self.segment, self.ring.slot(self.position.wrapping_sub(1)))
    }

    /// Releases the received slots to the writer.
    pub(super) fn release(&self) {
        Self::release_all(std::iter::once(self));
    }

    /// Releases the received slots of many writers.
    pub(super) fn release_all<'a>(inboxes: impl Iterator<Item = &'a Self> + Clone) {
        for inbox in inboxes.clone() {
            inbox.own.word(inbox.passed).store(inbox.position, Ordering::Release);
        }
        fence(Ordering::SeqCst);
        for inbox in inboxes {
            inbox.writer_eventcount.ring_if_awaited(inbox.rank);
        }
    }

    /// Passes `count` slots that are not for this rank.
    pub(super) fn skip(&mut self, count: usize) {
        self.position = self.position.wrapping_add(count as u32);
        self.release();
    }
}
