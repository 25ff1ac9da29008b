//! The shared memory of one group, as one of its ranks uses it.
use super::board::{Board, Room};
use super::eventcount::{Eventcount, Waiter, close};
use super::layout::{Layout, Ring, Sleeper};
use super::segment::{Memory, Segment};
use super::stream::{Inbox, Outbox, Reader};
use super::sync::{AtomicBool, Ordering, fence};
use crate::call::Header;
use crate::memory::Region;
use crate::panic::lock;
use crate::transport_error::TransportError;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// All streams of one rank of a host. Ranks are numbered by their position on the host.
pub(crate) struct ShmGroup {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) layout: Layout,
    memory: Arc<Memory>,
    /// Messages between the ranks apart from data.
    pub(crate) board: Board,
    /// Set when the group has failed: no thread waits any more.
    closed: AtomicBool,
    /// By rank.
    segments: Vec<Arc<Segment>>,
    pub(super) collectives: Mutex<CollectiveStreams>,
    /// By peer; `None` for this rank itself.
    sends: Vec<Option<Direct<Outbox>>>,
    recvs: Vec<Option<Direct<Inbox>>>,
    /// By place: whether the words for messages of the rank there are reserved.
    words_reserved: Mutex<Vec<bool>>,
}

/// A stream of messages.
struct Direct<End> {
    /// Whether it has been used: its memory is reserved then.
    used: AtomicBool,
    end: Mutex<(Eventcount, End)>,
}

/// The streams of the collectives: one from every rank to all others.
pub(super) struct CollectiveStreams {
    pub(super) eventcount: Eventcount,
    pub(super) outbox: Outbox,
    /// By rank; `None` for this rank itself.
    pub(super) inboxes: Vec<Option<Inbox>>,
    /// The number of calls so far, and for each rank the number of the last call for which it has sent something.
    pub(super) calls: u32,
    pub(super) met: Vec<u32>,
}

impl ShmGroup {
    /// The size of the words and segments, and of the whole file.
    pub(super) fn sizes(room: Room, layout: &Layout) -> (usize, usize) {
        let mapped = layout.size().saturating_mul(room.ranks).saturating_add(Board::size(room));
        (mapped, mapped.saturating_add(Board::letters(room.ranks)))
    }

    /// The part of the file for the collectives of the rank at `place`.
    pub(super) fn reserved(place: usize, room: Room, layout: &Layout) -> Range<usize> {
        let start = Self::segment(place, room, layout).start;
        start..start + layout.reserved()
    }

    fn segment(place: usize, room: Room, layout: &Layout) -> Range<usize> {
        let start = Board::size(room) + place * layout.size();
        start..start + layout.size()
    }

    /// The group of the ranks at `places` of the host's memory, which has the given room and layout. This is rank `rank` of the
    /// host.
    pub(super) fn new(rank: usize, layout: Layout, memory: Arc<Memory>, room: Room, places: &[usize]) -> Self {
        let segment = |place: &usize| Arc::new(Segment::new(&memory, Self::segment(*place, room, &layout)));
        let segments: Vec<_> = places.iter().map(segment).collect();
        let letters = Self::sizes(room, &layout).0;
        let board = Board::new(rank, places.to_vec(), memory.clone(), room, letters);
        let (own, world_size) = (segments[rank].clone(), segments.len());
        let eventcount = |rank: usize, sleeper: Sleeper| Eventcount::new(&segments[rank], &layout, sleeper);
        let reader = |peer: usize, passed: usize, sleeper: Sleeper| Reader {
            rank: peer,
            eventcount: eventcount(peer, sleeper),
            segment: segments[peer].clone(),
            passed,
            seen: 0,
        };
        let outbox = |ring, readers: Vec<Reader>| Outbox { rank, ring, segment: own.clone(), readers, position: 0 };
        let inbox = |writer: usize, ring, passed: usize, sleeper: Sleeper| Inbox {
            rank,
            writer,
            ring,
            segment: segments[writer].clone(),
            own: own.clone(),
            passed,
            writer_eventcount: eventcount(writer, sleeper),
            position: 0,
        };
        let collectives = CollectiveStreams {
            eventcount: eventcount(rank, Sleeper::Collectives),
            outbox: outbox(
                layout.ring(),
                (0..world_size)
                    .filter(|peer| *peer != rank)
                    .map(|peer| reader(peer, layout.passed(rank), Sleeper::Collectives))
                    .collect(),
            ),
            inboxes: by_peer(rank, world_size, |peer| {
                inbox(peer, layout.ring(), layout.passed(peer), Sleeper::Collectives)
            }),
            calls: 0,
            met: vec![0; world_size],
        };
        let sends = by_peer(rank, world_size, |peer| {
            let reader = reader(peer, layout.direct_passed(rank), Sleeper::RecvFrom(rank));
            let outbox = outbox(layout.direct_ring(rank, peer), vec![reader]);
            Direct::new(eventcount(rank, Sleeper::SendTo(peer)), outbox)
        });
        let recvs = by_peer(rank, world_size, |peer| {
            let (ring, passed) = (layout.direct_ring(peer, rank), layout.direct_passed(peer));
            let inbox = inbox(peer, ring, passed, Sleeper::SendTo(rank));
            Direct::new(eventcount(rank, Sleeper::RecvFrom(peer)), inbox)
        });
        let collectives = Mutex::new(collectives);
        let (closed, words_reserved) = (AtomicBool::new(false), Mutex::new(vec![false; world_size]));
        Self { rank, world_size, layout, memory, board, closed, segments, collectives, sends, recvs, words_reserved }
    }

    /// Records that this rank has finished call number `sequence` of the given kind.
    pub(crate) fn set_finished(&self, kind: Sleeper, sequence: u64) {
        let count = sequence.wrapping_add(1) as u32;
        self.segments[self.rank].word(self.layout.finished(kind)).store(count, Ordering::Release);
    }

    /// How many calls of the given kind rank `peer` has finished, counting the one with number 0. This rank is near
    /// call number `near`. The memory of an ended process stays readable.
    pub(crate) fn finished_by(&self, peer: usize, kind: Sleeper, near: u64) -> u64 {
        // The words for messages take no memory before they are needed.
        if !matches!(kind, Sleeper::Collectives) && !self.board.uses_messages(peer) {
            return 0;
        }
        let count = self.segments[peer].word(self.layout.finished(kind)).load(Ordering::Acquire);
        near.saturating_add_signed(i64::from(count.wrapping_sub(near as u32) as i32))
    }

    /// Ends every wait of this rank, now and later.
    pub(crate) fn close(&self) {
        let own = &self.segments[self.rank];
        let eventcount = |sleeper| Eventcount::new(own, &self.layout, sleeper);
        close(&self.closed, std::iter::once(eventcount(Sleeper::Collectives)));
        // A message that is not seen here sees that the group is closed before it sleeps.
        fence(Ordering::SeqCst);
        let sleepers = used(&self.sends).map(Sleeper::SendTo).chain(used(&self.recvs).map(Sleeper::RecvFrom));
        sleepers.for_each(|sleeper| eventcount(sleeper).ring());
    }

    /// Reserves the memory for messages with rank `peer`, of which `ring` is a part of `writer`'s segment, before the first.
    fn reserve(&self, used: &AtomicBool, peer: usize, writer: usize, ring: Ring) -> Result<(), TransportError> {
        if used.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.board.use_messages();
        let mut words = lock(&self.words_reserved);
        let reserve = |rank: usize, range: Range<usize>| {
            let start = self.segments[rank].offset();
            self.memory.reserve(start + range.start..start + range.end).map_err(|error| {
                let bytes = range.len();
                TransportError::System(format!("cannot reserve {bytes} bytes of shared memory for messages: {error}"))
            })
        };
        for rank in [self.rank, peer] {
            if !words[rank] {
                reserve(rank, self.layout.direct_words())?;
                words[rank] = true;
            }
        }
        reserve(writer, ring.range())?;
        used.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Sends `data` to rank `peer`.
    pub(crate) fn send(
        &self,
        peer: usize,
        head: &[u8; Header::BYTES],
        data: Region,
        deadline: Instant,
    ) -> Result<(), TransportError> {
        let Direct { used, end } = stream(&self.sends, peer)?;
        let (eventcount, outbox) = &mut *lock(end);
        self.reserve(used, peer, self.rank, outbox.ring)?;
        let waiter = self.waiter(eventcount, deadline);
        for piece in pieces(data.len(), self.layout.direct_capacity) {
            outbox.publish(&waiter, head, |slot| slot.write_from(data.part(piece)))?;
        }
        Ok(())
    }

    /// Whether a message of so many bytes can be sent before its receiver comes.
    pub(crate) fn holds_message(&self, bytes: usize) -> bool {
        pieces(bytes, self.layout.direct_capacity).nth(self.layout.direct_slots).is_none()
    }

    /// Receives into `data` what rank `peer` sends.
    pub(crate) fn receive(
        &self,
        peer: usize,
        head: &[u8; Header::BYTES],
        data: Region,
        deadline: Instant,
    ) -> Result<(), TransportError> {
        let Direct { used, end } = stream(&self.recvs, peer)?;
        let (eventcount, inbox) = &mut *lock(end);
        self.reserve(used, peer, peer, inbox.ring)?;
        let waiter = self.waiter(eventcount, deadline);
        for piece in pieces(data.len(), self.layout.direct_capacity) {
            inbox.receive(&waiter, head)?;
            inbox.slot().read_into(data.part(piece))?;
            inbox.release();
        }
        Ok(())
    }

    pub(super) fn waiter<'a>(&'a self, eventcount: &'a Eventcount, deadline: Instant) -> Waiter<'a> {
        Waiter { eventcount, closed: &self.closed, deadline }
    }
}

impl<End> Direct<End> {
    fn new(eventcount: Eventcount, end: End) -> Self {
        Self { used: AtomicBool::new(false), end: Mutex::new((eventcount, end)) }
    }
}

/// The peers whose streams of messages have been used.
fn used<End>(streams: &[Option<Direct<End>>]) -> impl Iterator<Item = usize> {
    let is_used = |stream: &Direct<End>| stream.used.load(Ordering::Relaxed);
    streams.iter().enumerate().filter_map(move |(peer, stream)| stream.as_ref().is_some_and(is_used).then_some(peer))
}

fn by_peer<T>(rank: usize, world_size: usize, make: impl Fn(usize) -> T) -> Vec<Option<T>> {
    (0..world_size).map(|peer| (peer != rank).then(|| make(peer))).collect()
}

fn stream<T>(streams: &[Option<T>], peer: usize) -> Result<&T, TransportError> {
    let stream = streams.get(peer).and_then(Option::as_ref);
    stream.ok_or_else(|| TransportError::System(format!("there is no shared memory with rank {peer}")))
}

/// The parts of a message of `bytes` that fit into its slots. An empty message takes one slot too.
pub(crate) fn pieces(bytes: usize, capacity: usize) -> impl Iterator<Item = Range<usize>> {
    (0..bytes.max(1)).step_by(capacity).map(move |start| start..start.saturating_add(capacity).min(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arrival::Arrival;
    use crate::memory::buffer::Buffer;
    use crate::memory::{LockWaits, Locking};
    use crate::shm::slot::Slot;
    use std::time::Duration;

    const PART: usize = 256;

    /// The groups of all ranks of a world of `world_size`, whose streams have all passed `position` slots already.
    fn groups(world_size: usize, position: u32) -> Vec<ShmGroup> {
        let (layout, places) = (Layout::new(world_size, PART), Vec::from_iter(0..world_size));
        let room = Room { ranks: world_size, group: world_size };
        let (mapped, size) = ShmGroup::sizes(room, &layout);
        let memory = Arc::new(Memory::create("candle-ddp-test", mapped, size).unwrap());
        let group = |rank| ShmGroup::new(rank, layout, memory.clone(), room, &places);
        let groups: Vec<ShmGroup> = (0..world_size).map(group).collect();
        for shm in &groups {
            let CollectiveStreams { outbox, inboxes, .. } = &mut *lock(&shm.collectives);
            outbox.position = position;
            outbox.readers.iter_mut().for_each(|reader| reader.seen = position);
            for inbox in inboxes.iter_mut().flatten() {
                inbox.position = position;
                inbox.release();
            }
        }
        groups
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(120)
    }

    const HEAD: [u8; Header::BYTES] = [7; Header::BYTES];

    fn filled(slot: Slot, value: u8) -> Result<(), TransportError> {
        slot.write(&[value; PART]);
        Ok(())
    }

    /// Sends 100 slots from rank 0 to the others, which read them one after the other.
    fn stream(groups: &[ShmGroup]) {
        std::thread::scope(|scope| {
            for shm in groups {
                scope.spawn(move || {
                    let arrival = Arrival::default();
                    let mut streams = shm.streams(HEAD, soon(), &arrival);
                    for number in 0..100_u8 {
                        if shm.rank == 0 {
                            streams.publish(|slot, _| filled(slot, number)).unwrap();
                        } else if number == 50 {
                            streams.skip(0, 1).unwrap();
                        } else {
                            let mut read = [0; PART];
                            streams
                                .take(0, |slot| {
                                    slot.read(&mut read);
                                    Ok(())
                                })
                                .unwrap();
                            assert_eq!(read, [number; PART]);
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn streams_outlive_their_rings_and_their_numbers() {
        for position in [0, 5, u32::MAX - 30, i32::MAX as u32 - 30] {
            stream(&groups(3, position));
        }
    }

    #[test]
    fn closing_ends_a_sleep() {
        let groups = groups(2, 0);
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(|| groups[1].streams(HEAD, soon(), &Arrival::default()).take(0, |_| Ok(())));
            let receiver = scope.spawn(|| {
                let (buffer, waits) = (Buffer::new([0; 5]), LockWaits::default());
                let region = Region::new(&buffer, 0..5, Locking { waits: &waits, deadline: soon() });
                groups[1].receive(0, &HEAD, region, soon())
            });
            std::thread::sleep(Duration::from_millis(20));
            groups[1].close();
            for result in [sleeper.join().unwrap(), receiver.join().unwrap()] {
                assert!(matches!(result, Err(TransportError::Closed { peer: 0, .. })), "{result:?}");
            }
        });
    }

    #[test]
    fn how_far_a_rank_came_can_be_read_by_its_peers() {
        let groups = groups(3, 0);
        let finished = |kind, near| groups[1].finished_by(0, kind, near);
        assert_eq!([Sleeper::Collectives, Sleeper::SendTo(1)].map(|kind| finished(kind, 1)), [0, 0]);
        groups[0].board.use_messages();
        for sequence in [0, 5, u64::from(u32::MAX), 1 << 32, (7 << 32) + 3] {
            groups[0].set_finished(Sleeper::Collectives, sequence);
            groups[0].set_finished(Sleeper::SendTo(1), sequence + 2);
            for near in [sequence.saturating_sub(9), sequence, sequence + 1000] {
                assert_eq!(finished(Sleeper::Collectives, near), sequence + 1, "{sequence} near {near}");
                assert_eq!(finished(Sleeper::SendTo(1), near), sequence + 3);
                assert_eq!(finished(Sleeper::RecvFrom(1), 2), 0);
            }
        }
    }

    /// Rank 1 is in another call, and rank 0, which is awaited first, does not come.
    #[test]
    fn another_call_is_noticed_whoever_is_waited_for() {
        let groups = groups(3, 0);
        let other = [8; Header::BYTES];
        groups[1].streams(other, soon(), &Arrival::default()).publish(|_, _| Ok(())).unwrap();
        let result = groups[2].streams(HEAD, soon(), &Arrival::default()).receive_all();
        assert!(matches!(result, Err(TransportError::Header { peer: 1, received }) if received == other), "{result:?}");
    }

    #[test]
    fn a_deadline_ends_a_wait_for_space_too() {
        let groups = groups(2, 0);
        let arrival = Arrival::default();
        let mut streams = groups[0].streams(HEAD, Instant::now() + Duration::from_millis(30), &arrival);
        let error = (0..).find_map(|_| streams.publish(|_, _| Ok(())).err());
        assert!(matches!(error, Some(TransportError::TimedOut { peers }) if peers == [1]));
        assert_eq!(streams.streams.outbox.position as usize, groups[0].layout.slots);
    }
}
