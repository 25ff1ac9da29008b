//! The properties of every order: no wake-up is lost, no slot is read before it is written, none is overwritten before all
//! readers have passed it, and closing a group ends every wait.
//!
//! A lost wake-up shows as a deadlock, the second and third as an access without an order, or as a wrong number.
use super::eventcount::{Eventcount, Waiter, close};
use super::layout::{Layout, Sleeper};
use super::segment::Segment;
use super::stream::{Inbox, Outbox, Reader};
use super::sync::{AtomicBool, Ordering};
use crate::transport_error::TransportError;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A rank of a host: the part of `ShmGroup` that collectives use.
struct Rank {
    number: usize,
    layout: Layout,
    segments: Vec<Arc<Segment>>,
    closed: Arc<AtomicBool>,
    eventcount: Eventcount,
    outbox: Outbox,
    /// By rank; `None` for this rank itself.
    inboxes: Vec<Option<Inbox>>,
}

impl Rank {
    fn new(number: usize, layout: Layout, segments: &[Arc<Segment>], first: u32) -> Self {
        let eventcount = |rank: usize| Eventcount::new(&segments[rank], &layout, Sleeper::Collectives);
        let peers = || (0..segments.len()).filter(|peer| *peer != number);
        let reader = |peer: usize| Reader {
            rank: peer,
            eventcount: eventcount(peer),
            segment: segments[peer].clone(),
            passed: layout.passed(number),
            seen: first,
        };
        let inbox = |writer: usize| Inbox {
            rank: number,
            writer,
            ring: layout.ring(),
            segment: segments[writer].clone(),
            own: segments[number].clone(),
            passed: layout.passed(writer),
            writer_eventcount: eventcount(writer),
            position: first,
        };
        let outbox = Outbox {
            rank: number,
            ring: layout.ring(),
            segment: segments[number].clone(),
            readers: peers().map(reader).collect(),
            position: first,
        };
        let mut inboxes: Vec<_> = segments.iter().map(|_| None).collect();
        peers().for_each(|peer| inboxes[peer] = Some(inbox(peer)));
        inboxes.iter().flatten().for_each(Inbox::release);
        Self {
            number,
            layout,
            segments: segments.to_vec(),
            closed: Arc::new(AtomicBool::new(false)),
            eventcount: eventcount(number),
            outbox,
            inboxes,
        }
    }

    fn publish(&mut self, value: u32) -> Result<(), TransportError> {
        let waiter = Waiter { eventcount: &self.eventcount, closed: &self.closed, deadline: never() };
        self.outbox.publish(&waiter, &HEAD, |slot| {
            slot.write(value);
            Ok(())
        })
    }

    fn take(&mut self, peer: usize) -> Result<u32, TransportError> {
        let waiter = Waiter { eventcount: &self.eventcount, closed: &self.closed, deadline: never() };
        let inbox = self.inboxes[peer].as_mut().unwrap();
        inbox.receive(&waiter, &HEAD)?;
        let value = inbox.slot().read();
        inbox.release();
        Ok(value)
    }

    fn skip(&mut self, peer: usize) {
        self.inboxes[peer].as_mut().unwrap().skip(1);
    }

    /// The handle by which a monitor closes this rank's group.
    fn closer(&self) -> impl FnOnce() + Send + 'static {
        let (closed, own, layout) = (self.closed.clone(), self.segments[self.number].clone(), self.layout);
        move || close(&closed, std::iter::once(Eventcount::new(&own, &layout, Sleeper::Collectives)))
    }
}

const HEAD: [u8; 4] = [7; 4];

/// The model has no time; the deadline is never near.
fn never() -> Instant {
    Instant::now() + Duration::from_secs(1 << 20)
}

/// The ranks of a host whose rings have `slots` slots, all of whose streams have passed `first` slots already.
fn ranks(world_size: usize, slots: usize, first: u32) -> Vec<Rank> {
    let layout = Layout { slots, ..Layout::new(world_size, 1) };
    let segments: Vec<_> = (0..world_size).map(|_| Arc::new(Segment::new(&layout))).collect();
    for segment in segments.iter().filter(|_| first != 0) {
        for position in (1..=slots as u32).map(|back| first.wrapping_sub(back)) {
            segment.word(layout.ring().line(position)).store(position.wrapping_add(1), Ordering::Relaxed);
        }
    }
    (0..world_size).map(|rank| Rank::new(rank, layout, &segments, first)).collect()
}

/// Explores `test`. With `preemptions`, only the orders in which threads that could continue are interrupted that often.
fn explore(preemptions: Option<usize>, test: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = preemptions;
    model.check(test);
}

/// A limit of preemptions; `LOOM_MAX_PREEMPTIONS` replaces it.
fn preemptions(default: usize) -> Option<usize> {
    Some(std::env::var("LOOM_MAX_PREEMPTIONS").ok().and_then(|limit| limit.parse().ok()).unwrap_or(default))
}

/// Rank 0 sends `count` slots through a ring of `slots`; the others read them.
fn stream(world_size: usize, slots: usize, first: u32, count: u32, preemptions: Option<usize>) {
    explore(preemptions, move || {
        let mut ranks = ranks(world_size, slots, first);
        let readers = ranks.split_off(1);
        let spawn = |mut rank: Rank| {
            loom::thread::spawn(move || (1..=count).for_each(|number| assert_eq!(rank.take(0).unwrap(), number)))
        };
        let readers: Vec<_> = readers.into_iter().map(spawn).collect();
        (1..=count).for_each(|number| ranks[0].publish(number).unwrap());
        readers.into_iter().for_each(|reader| reader.join().unwrap());
    });
}

#[test]
fn slots_arrive_once_and_in_order() {
    stream(2, 1, 0, 3, preemptions(3));
    stream(2, 2, 0, 3, preemptions(3));
}

#[test]
fn numbers_wrap() {
    stream(2, 1, u32::MAX, 2, preemptions(3));
}

#[test]
fn a_slot_waits_for_its_last_reader() {
    stream(3, 1, 0, 2, preemptions(2));
}

/// Both ranks wait for space and for slots by the same eventcount, as in an all-reduce.
#[test]
fn ranks_exchange_slots() {
    explore(preemptions(3), || {
        let mut ranks = ranks(2, 1, 0);
        let (mut b, mut a) = (ranks.pop().unwrap(), ranks.pop().unwrap());
        let other = loom::thread::spawn(move || {
            for number in 1..=2 {
                b.publish(10 + number).unwrap();
                assert_eq!(b.take(0).unwrap(), 20 + number);
            }
        });
        for number in 1..=2 {
            a.publish(20 + number).unwrap();
            assert_eq!(a.take(1).unwrap(), 10 + number);
        }
        other.join().unwrap();
    });
}

/// A rank that waits for one peer and then for the other is woken by the right ones.
#[test]
fn one_eventcount_serves_waits_for_several_peers() {
    explore(preemptions(3), || {
        let mut ranks = ranks(3, 1, 0);
        let writers = ranks.split_off(1);
        let mut reader = ranks.pop().unwrap();
        let spawn = |mut rank: Rank| loom::thread::spawn(move || rank.publish(rank.number as u32).unwrap());
        let writers: Vec<_> = writers.into_iter().map(spawn).collect();
        assert_eq!([reader.take(1).unwrap(), reader.take(2).unwrap()], [1, 2]);
        writers.into_iter().for_each(|writer| writer.join().unwrap());
    });
}

/// A reader passes a slot for another before it is written.
#[test]
fn skipped_slots_are_free() {
    explore(preemptions(3), || {
        let mut ranks = ranks(2, 1, 0);
        let (mut reader, mut writer) = (ranks.pop().unwrap(), ranks.pop().unwrap());
        let thread = loom::thread::spawn(move || {
            reader.skip(0);
            assert_eq!(reader.take(0).unwrap(), 2);
        });
        (1..=2).for_each(|number| writer.publish(number).unwrap());
        thread.join().unwrap();
    });
}

/// The peer never comes; a monitor closes the group.
#[test]
fn closing_ends_a_wait_for_a_slot() {
    explore(None, || {
        let mut rank = ranks(2, 1, 0).pop().unwrap();
        let monitor = loom::thread::spawn(rank.closer());
        assert!(matches!(rank.take(0), Err(TransportError::Closed { peer: 0, .. })));
        monitor.join().unwrap();
    });
}

#[test]
fn closing_ends_a_wait_for_space() {
    explore(None, || {
        let mut rank = ranks(2, 1, 0).swap_remove(0);
        rank.publish(1).unwrap();
        let monitor = loom::thread::spawn(rank.closer());
        assert!(matches!(rank.publish(2), Err(TransportError::Closed { peer: 1, .. })));
        monitor.join().unwrap();
    });
}

/// A slot and the end of the group come at the same time: the rank gets one or the other, and sleeps in no case.
#[test]
fn closing_may_race_with_a_slot() {
    explore(preemptions(3), || {
        let mut ranks = ranks(2, 1, 0);
        let (mut reader, mut writer) = (ranks.pop().unwrap(), ranks.pop().unwrap());
        let monitor = loom::thread::spawn(reader.closer());
        let thread = loom::thread::spawn(move || writer.publish(5).unwrap());
        match reader.take(0) {
            Ok(value) => assert_eq!(value, 5),
            Err(error) => assert!(matches!(error, TransportError::Closed { peer: 0, .. })),
        }
        monitor.join().unwrap();
        thread.join().unwrap();
    });
}
