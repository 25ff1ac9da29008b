//! How a thread waits for a peer: first it spins, then it sleeps until the peer rings its eventcount.
use super::layout::{Layout, Sleeper};
use super::segment::Segment;
use super::spin::{Spun, spin};
use super::sync::{AtomicBool, AtomicU32, Ordering, fence, futex_wait, futex_wake};
use crate::transport_error::TransportError;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The eventcount of one thread of one rank, in that rank's segment.
///
/// The sleeper records which rank it waits for, then checks a last time and sleeps. A peer makes its change, then
/// checks whether the sleeper waits for it. Both have a sequentially consistent fence in between, so at least one of
/// them sees the other. A sequence number that changes with every ring also ends the sleep if the ring comes between
/// the last check and the sleep.
pub(super) struct Eventcount {
    segment: Arc<Segment>,
    rings: usize,
    awaited: usize,
    /// The number of ranks that share the processors.
    ranks: usize,
}

/// No rank is awaited.
const NOBODY: u32 = 0;

impl Eventcount {
    pub(super) fn new(segment: &Arc<Segment>, layout: &Layout, sleeper: Sleeper) -> Self {
        let offset = layout.eventcount(sleeper);
        Self { segment: segment.clone(), rings: offset, awaited: offset + 4, ranks: layout.ranks }
    }

    fn rings(&self) -> &AtomicU32 {
        self.segment.word(self.rings)
    }

    fn awaited(&self) -> &AtomicU32 {
        self.segment.word(self.awaited)
    }

    /// Call after rank `rank` has made a change and then a sequentially consistent fence, of which one is enough for any number
    /// of sleepers: wakes the sleeper if it waits for that rank.
    pub(super) fn ring_if_awaited(&self, rank: usize) {
        if self.awaited().load(Ordering::Relaxed) == rank as u32 + 1 {
            self.ring();
        }
    }

    pub(super) fn ring(&self) {
        self.rings().fetch_add(1, Ordering::Release);
        futex_wake(self.rings());
    }
}

/// Closes a group: ends the waits of all threads that share `closed`, each of which sleeps on one of `eventcounts`.
pub(super) fn close(closed: &AtomicBool, eventcounts: impl Iterator<Item = Eventcount>) {
    closed.store(true, Ordering::Release);
    eventcounts.for_each(|eventcount| eventcount.ring());
}

/// The state that a thread needs to wait.
pub(super) struct Waiter<'a> {
    pub(super) eventcount: &'a Eventcount,
    /// Whether the group has failed.
    pub(super) closed: &'a AtomicBool,
    pub(super) deadline: Instant,
}

impl Waiter<'_> {
    /// Returns once `ready` is true; rank `peer` makes it so. The result is when that was, unless it was at once.
    pub(super) fn wait(&self, peer: usize, ready: impl Fn() -> bool) -> Result<Option<Instant>, TransportError> {
        self.wait_unless(peer, ready, || false)
    }

    /// Like [`wait`](Self::wait), but also returns soon after `futile` has become true, which is checked only now and then.
    pub(super) fn wait_unless(
        &self,
        peer: usize,
        ready: impl Fn() -> bool,
        futile: impl Fn() -> bool,
    ) -> Result<Option<Instant>, TransportError> {
        if ready() {
            return Ok(None);
        }
        match spin(self.eventcount.ranks, &ready, || self.check_closed(peer))? {
            Spun::AtOnce => return Ok(None),
            Spun::At(time) => return Ok(Some(time)),
            Spun::NotYet => {}
        }
        let result = self.sleep(peer, || ready() || futile());
        self.eventcount.awaited().store(NOBODY, Ordering::Relaxed);
        result.map(|()| Some(Instant::now()))
    }

    fn sleep(&self, peer: usize, ready: impl Fn() -> bool) -> Result<(), TransportError> {
        /// If a peer was killed between its change and the ring, this is how often its change is checked.
        const LONGEST: Duration = Duration::from_millis(100);
        loop {
            // What came before these rings is seen below, because of the fence.
            let rings = self.eventcount.rings().load(Ordering::Relaxed);
            self.eventcount.awaited().store(peer as u32 + 1, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            if ready() {
                return Ok(());
            }
            self.check_closed(peer)?;
            let left = self.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(TransportError::TimedOut { peers: vec![peer] });
            }
            futex_wait(self.eventcount.rings(), rings, left.min(LONGEST)).map_err(TransportError::System)?;
        }
    }

    fn check_closed(&self, peer: usize) -> Result<(), TransportError> {
        match self.closed.load(Ordering::Acquire) {
            false => Ok(()),
            true => Err(TransportError::Closed { peer, reason: "the group has ended".into() }),
        }
    }
}
