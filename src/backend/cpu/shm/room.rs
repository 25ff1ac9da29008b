//! The shared memory of one group, as one of its ranks uses it.
use super::bell::{Bell, Waiter};
use super::call::Header;
use super::kernels::Source;
use super::layout::{Layout, Sleeper};
use super::lock;
use super::segment::Segment;
use super::slot::Slot;
use super::storage::Region;
use super::stream::{Inbox, Outbox, Reader};
use super::transport::Stall;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

/// All streams of one rank of a host. Ranks have the numbers that they have there.
pub(in super::super) struct Room {
    rank: usize,
    world_size: usize,
    layout: Layout,
    /// The group has failed: nobody waits any more.
    closed: AtomicBool,
    /// By rank.
    segments: Vec<Arc<Segment>>,
    collectives: Mutex<Streams>,
    /// By peer; `None` for this rank itself.
    sends: Vec<Option<Mutex<(Bell, Outbox)>>>,
    recvs: Vec<Option<Mutex<(Bell, Inbox)>>>,
}

/// The streams of the collectives: one from every rank to all others.
struct Streams {
    bell: Bell,
    outbox: Outbox,
    /// By rank; `None` for this rank itself.
    inboxes: Vec<Option<Inbox>>,
}

impl Room {
    /// Over the segments of all ranks of the host, in rank order, which are as `layout` says.
    pub(super) fn new(rank: usize, layout: Layout, segments: &[Arc<Segment>]) -> Self {
        let (own, world_size) = (segments[rank].clone(), segments.len());
        let bell = |rank: usize, sleeper: Sleeper| Bell::new(&segments[rank], &layout, sleeper);
        let reader = |peer: usize, passed: usize, sleeper: Sleeper| Reader {
            rank: peer,
            bell: bell(peer, sleeper),
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
            writer_bell: bell(writer, sleeper),
            position: 0,
        };
        let collectives = Streams {
            bell: bell(rank, Sleeper::Collectives),
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
        };
        let sends = by_peer(rank, world_size, |peer| {
            let reader = reader(peer, layout.direct_passed(rank), Sleeper::RecvFrom(rank));
            let outbox = outbox(layout.direct_ring(rank, peer), vec![reader]);
            Mutex::new((bell(rank, Sleeper::SendTo(peer)), outbox))
        });
        let recvs = by_peer(rank, world_size, |peer| {
            let (ring, passed) = (layout.direct_ring(peer, rank), layout.direct_passed(peer));
            Mutex::new((bell(rank, Sleeper::RecvFrom(peer)), inbox(peer, ring, passed, Sleeper::SendTo(rank))))
        });
        let collectives = Mutex::new(collectives);
        let segments = segments.to_vec();
        Self { rank, world_size, layout, closed: AtomicBool::new(false), segments, collectives, sends, recvs }
    }

    /// Notes that this rank has finished call number `sequence` of the given kind.
    pub(in super::super) fn set_finished(&self, kind: Sleeper, sequence: u64) {
        let count = sequence.wrapping_add(1) as u32;
        self.segments[self.rank].word(self.layout.finished(kind)).store(count, Ordering::Release);
    }

    /// How many calls of the given kind rank `peer` has finished, the one with the number 0 included. This rank is near
    /// call number `near` itself. The memory of a process that is gone stays readable.
    pub(in super::super) fn finished_by(&self, peer: usize, kind: Sleeper, near: u64) -> u64 {
        let count = self.segments[peer].word(self.layout.finished(kind)).load(Ordering::Acquire);
        near.saturating_add_signed(i64::from(count.wrapping_sub(near as u32) as i32))
    }

    /// Ends every wait of this rank, now and later.
    pub(in super::super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        let direct = (0..self.world_size).flat_map(|peer| [Sleeper::SendTo(peer), Sleeper::RecvFrom(peer)]);
        for sleeper in direct.chain([Sleeper::Collectives]) {
            Bell::new(&self.segments[self.rank], &self.layout, sleeper).ring();
        }
    }

    /// The streams of the collectives for one call, whose slots begin with `head`.
    pub(in super::super) fn post(&self, head: [u8; Header::BYTES], deadline: Instant) -> Post<'_> {
        Post { room: self, streams: lock(&self.collectives), head, deadline }
    }

    /// Sends `data` to rank `peer`.
    pub(in super::super) fn send(
        &self,
        peer: usize,
        head: &[u8; Header::BYTES],
        data: Region,
        deadline: Instant,
    ) -> Result<(), Stall> {
        let (bell, outbox) = &mut *lock(stream(&self.sends, peer)?);
        let waiter = self.waiter(bell, deadline);
        for piece in pieces(data.len(), self.layout.direct_capacity) {
            outbox.publish(&waiter, head, |slot| slot.write_from(data.part(piece)))?;
        }
        Ok(())
    }

    /// `data` becomes what rank `peer` sends.
    pub(in super::super) fn receive(
        &self,
        peer: usize,
        head: &[u8; Header::BYTES],
        data: Region,
        deadline: Instant,
    ) -> Result<(), Stall> {
        let (bell, inbox) = &mut *lock(stream(&self.recvs, peer)?);
        let waiter = self.waiter(bell, deadline);
        for piece in pieces(data.len(), self.layout.direct_capacity) {
            inbox.receive(&waiter, head)?;
            inbox.slot().read_into(data.part(piece))?;
            inbox.release();
        }
        Ok(())
    }

    fn waiter<'a>(&'a self, bell: &'a Bell, deadline: Instant) -> Waiter<'a> {
        Waiter { bell, closed: &self.closed, deadline }
    }
}

fn by_peer<T>(rank: usize, world_size: usize, make: impl Fn(usize) -> T) -> Vec<Option<T>> {
    (0..world_size).map(|peer| (peer != rank).then(|| make(peer))).collect()
}

fn stream<T>(streams: &[Option<T>], peer: usize) -> Result<&T, Stall> {
    let stream = streams.get(peer).and_then(Option::as_ref);
    stream.ok_or_else(|| Stall::System(format!("there is no shared memory with rank {peer}")))
}

/// What fits into the slots of a message of `bytes`, one after the other. An empty message takes one slot, too.
pub(in super::super) fn pieces(bytes: usize, capacity: usize) -> impl Iterator<Item = Range<usize>> {
    (0..bytes.max(1)).step_by(capacity).map(move |start| start..start.saturating_add(capacity).min(bytes))
}

/// One call's use of the streams of the collectives. All ranks publish, receive and skip as the call demands, so that
/// they agree on what every slot of every stream holds.
pub(in super::super) struct Post<'a> {
    room: &'a Room,
    streams: MutexGuard<'a, Streams>,
    head: [u8; Header::BYTES],
    deadline: Instant,
}

impl Post<'_> {
    pub(in super::super) fn rank(&self) -> usize {
        self.room.rank
    }

    pub(in super::super) fn world_size(&self) -> usize {
        self.room.world_size
    }

    pub(in super::super) fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.rank();
        (0..self.world_size()).filter(move |peer| *peer != rank)
    }

    /// Bytes of a slot for each peer, where they hold different ones.
    pub(in super::super) fn part(&self) -> usize {
        self.room.layout.part()
    }

    /// Bytes of a slot.
    pub(in super::super) fn capacity(&self) -> usize {
        self.room.layout.capacity
    }

    /// Sends a slot to all peers. `fill` writes its payload, and may read the slots that were received last.
    pub(in super::super) fn publish(
        &mut self,
        fill: impl FnOnce(Slot, Arrived) -> Result<(), Stall>,
    ) -> Result<(), Stall> {
        let Streams { bell, outbox, inboxes } = &mut *self.streams;
        outbox.publish(&self.room.waiter(bell, self.deadline), &self.head, |slot| fill(slot, Arrived(inboxes)))
    }

    /// Waits for the next slot of every peer.
    pub(in super::super) fn receive_all(&mut self) -> Result<(), Stall> {
        let Streams { bell, inboxes, .. } = &mut *self.streams;
        let waiter = self.room.waiter(bell, self.deadline);
        for index in 0..inboxes.len() {
            let Some(inbox) = &inboxes[index] else { continue };
            // A peer that is in another call may be the reason why the one in turn does not come.
            let is_foreign = |inbox: &Inbox| inbox.is_foreign(&self.head);
            let others = &inboxes[index + 1..];
            waiter.wait(inbox.writer, || inbox.has_arrived() || others.iter().flatten().any(is_foreign))?;
            if let Some(foreign) = inboxes[index..].iter_mut().flatten().find(|inbox| is_foreign(inbox)) {
                return foreign.accept(&self.head);
            }
            if let Some(inbox) = &mut inboxes[index] {
                inbox.accept(&self.head)?;
            }
        }
        Ok(())
    }

    /// The slots that were received last.
    pub(in super::super) fn arrived(&self) -> Arrived<'_> {
        Arrived(&self.streams.inboxes)
    }

    /// Gives back what was received from all peers.
    pub(in super::super) fn release_all(&mut self) {
        self.streams.inboxes.iter().flatten().for_each(Inbox::release);
    }

    /// Waits for the next slot of rank `peer`, gives it to `read`, and gives it back.
    pub(in super::super) fn take(
        &mut self,
        peer: usize,
        read: impl FnOnce(Slot) -> Result<(), Stall>,
    ) -> Result<(), Stall> {
        let Streams { bell, inboxes, .. } = &mut *self.streams;
        let inbox = inbox_mut(inboxes, peer)?;
        inbox.receive(&self.room.waiter(bell, self.deadline), &self.head)?;
        read(inbox.slot())?;
        inbox.release();
        Ok(())
    }

    /// Passes the next `count` slots of rank `peer`, which are for others.
    pub(in super::super) fn skip(&mut self, peer: usize, count: usize) -> Result<(), Stall> {
        inbox_mut(&mut self.streams.inboxes, peer)?.skip(count);
        Ok(())
    }
}

fn inbox_mut(inboxes: &mut [Option<Inbox>], peer: usize) -> Result<&mut Inbox, Stall> {
    let inbox = inboxes.get_mut(peer).and_then(Option::as_mut);
    inbox.ok_or_else(|| Stall::System(format!("there is no shared memory with rank {peer}")))
}

/// The slots that were received last, one from each peer.
#[derive(Clone, Copy)]
pub(in super::super) struct Arrived<'a>(&'a [Option<Inbox>]);

impl<'a> Arrived<'a> {
    /// What is reduced, in rank order: `own` of this rank, and of every peer the given part of its slot.
    pub(in super::super) fn sources(self, own: Source<'a>, part: impl Fn(usize) -> Range<usize>) -> Vec<Source<'a>> {
        let source = |(rank, inbox): (usize, &'a Option<Inbox>)| match inbox {
            Some(inbox) => Source::Shared(inbox.slot().part(part(rank))),
            None => own,
        };
        self.0.iter().enumerate().map(source).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cpu::storage::{LockWaits, Locking};
    use candle_core::{DType, Device, Tensor};
    use std::time::Duration;

    const PART: usize = 256;

    /// The rooms of a world of `world_size`, all of whose streams have passed `position` slots already.
    fn rooms(world_size: usize, position: u32) -> Vec<Room> {
        let layout = Layout::new(world_size, PART);
        let segment = |_| Arc::new(Segment::create("candle-ddp-test", layout.size()).unwrap().0);
        let segments: Vec<_> = (0..world_size).map(segment).collect();
        let rooms: Vec<Room> = (0..world_size).map(|rank| Room::new(rank, layout, &segments)).collect();
        for room in &rooms {
            let Streams { outbox, inboxes, .. } = &mut *lock(&room.collectives);
            outbox.position = position;
            outbox.readers.iter_mut().for_each(|reader| reader.seen = position);
            for inbox in inboxes.iter_mut().flatten() {
                inbox.position = position;
                inbox.release();
            }
        }
        rooms
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    const HEAD: [u8; Header::BYTES] = [7; Header::BYTES];

    fn filled(slot: Slot, value: u8) -> Result<(), Stall> {
        slot.write(&[value; PART]);
        Ok(())
    }

    /// Sends 100 slots from rank 0 to the others, which read them one after the other.
    fn stream(rooms: &[Room]) {
        std::thread::scope(|scope| {
            for room in rooms {
                scope.spawn(move || {
                    let mut post = room.post(HEAD, soon());
                    for number in 0..100_u8 {
                        if room.rank == 0 {
                            post.publish(|slot, _| filled(slot, number)).unwrap();
                        } else if number == 50 {
                            post.skip(0, 1).unwrap();
                        } else {
                            let mut read = [0; PART];
                            post.take(0, |slot| {
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
            stream(&rooms(3, position));
        }
    }

    #[test]
    fn closing_ends_a_sleep() {
        let rooms = rooms(2, 0);
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(|| rooms[1].post(HEAD, soon()).take(0, |_| Ok(())));
            let receiver = scope.spawn(|| {
                let (tensor, waits) = (Tensor::zeros(5, DType::U8, &Device::Cpu).unwrap(), LockWaits::default());
                let region = Region::of(&tensor, Locking { waits: &waits, deadline: soon() });
                rooms[1].receive(0, &HEAD, region, soon())
            });
            std::thread::sleep(Duration::from_millis(20));
            rooms[1].close();
            for result in [sleeper.join().unwrap(), receiver.join().unwrap()] {
                assert!(matches!(result, Err(Stall::Closed { peer: 0, .. })), "{result:?}");
            }
        });
    }

    #[test]
    fn how_far_a_rank_came_can_be_read_by_its_peers() {
        let rooms = rooms(3, 0);
        let finished = |kind, near| rooms[1].finished_by(0, kind, near);
        assert_eq!([Sleeper::Collectives, Sleeper::SendTo(1)].map(|kind| finished(kind, 1)), [0, 0]);
        for sequence in [0, 5, u64::from(u32::MAX), 1 << 32, (7 << 32) + 3] {
            rooms[0].set_finished(Sleeper::Collectives, sequence);
            rooms[0].set_finished(Sleeper::SendTo(1), sequence + 2);
            for near in [sequence.saturating_sub(9), sequence, sequence + 1000] {
                assert_eq!(finished(Sleeper::Collectives, near), sequence + 1, "{sequence} near {near}");
                assert_eq!(finished(Sleeper::SendTo(1), near), sequence + 3);
                assert_eq!(finished(Sleeper::RecvFrom(1), 2), 0);
            }
        }
    }

    /// Rank 1 is in another call, and rank 0, which is waited for first, does not come.
    #[test]
    fn another_call_is_noticed_whoever_is_waited_for() {
        let rooms = rooms(3, 0);
        let other = [8; Header::BYTES];
        rooms[1].post(other, soon()).publish(|_, _| Ok(())).unwrap();
        let result = rooms[2].post(HEAD, soon()).receive_all();
        assert!(matches!(result, Err(Stall::Header { peer: 1, received }) if received == other), "{result:?}");
    }

    #[test]
    fn a_deadline_ends_a_wait_for_space_too() {
        let rooms = rooms(2, 0);
        let mut post = rooms[0].post(HEAD, Instant::now() + Duration::from_millis(30));
        let error = (0..).find_map(|_| post.publish(|_, _| Ok(())).err());
        assert!(matches!(error, Some(Stall::TimedOut { peers }) if peers == [1]));
        assert_eq!(post.streams.outbox.position as usize, rooms[0].layout.slots);
    }
}
