//! Groups, messages and streams.
use super::super::Code;
use super::support::*;
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

impl Rank {
    fn send(&self, values: &[f32], peer: usize) -> c_int {
        // SAFETY: the tests keep the buffers until the stream has executed the call.
        unsafe { ncclSend(values.as_ptr().cast(), values.len(), F32, peer as c_int, self.comm.get(), self.stream) }
    }

    fn receive(&self, values: &mut [f32], peer: usize) -> c_int {
        let address = values.as_mut_ptr().cast();
        // SAFETY: the tests keep the buffers until the stream has executed the call.
        unsafe { ncclRecv(address, values.len(), F32, peer as c_int, self.comm.get(), self.stream) }
    }

    fn together(&self, calls: impl FnOnce()) {
        self.done(grouped(calls));
    }
}

#[test]
fn messages_in_a_group_cross() {
    // More than connections buffer, to all ranks including this one.
    const COUNT: usize = 300_000;
    in_all_worlds(|rank| {
        let gifts: Vec<Vec<f32>> = (0..rank.size).map(|peer| vec![(10 * rank.rank + peer) as f32; COUNT]).collect();
        let mut received = vec![vec![0.0; COUNT]; rank.size];
        rank.together(|| {
            gifts.iter().enumerate().for_each(|(peer, gift)| assert_eq!(rank.send(gift, peer), 0));
            received.iter_mut().enumerate().for_each(|(peer, buffer)| assert_eq!(rank.receive(buffer, peer), 0));
        });
        assert!(rank.synchronize(PATIENCE));
        for (peer, received) in received.iter().enumerate() {
            assert_eq!(*received, vec![(10 * peer + rank.rank) as f32; COUNT]);
        }
    });
}

#[test]
fn sends_outside_of_a_group_wait_for_their_receivers() {
    ranks(2, false, |rank| {
        let (one, mut other) = ([1.0; 10], [0.0; 10]);
        rank.done(rank.send(&one, 1 - rank.rank));
        rank.done(rank.receive(&mut other, 1 - rank.rank));
        // Both ranks send first.
        assert!(!rank.synchronize(WHILE));
        rank.abort();
        assert!(rank.synchronize(PATIENCE));
        assert_eq!(other, [0.0; 10]);
    });
}

#[test]
fn messages_keep_their_order() {
    ranks(2, true, |rank| {
        let expected = [0, 1, 2, 3].map(|number| [number as f32; 3]);
        for in_a_group in [false, true] {
            let mut buffers = [[9.0; 3]; 4];
            if rank.rank == 1 {
                // A delay, so that as many messages as possible are in flight.
                rank.stream().push(|| std::thread::sleep(Duration::from_millis(100)));
            }
            let mut calls = || {
                for (buffer, values) in buffers.iter_mut().zip(&expected) {
                    let code = if rank.rank == 0 { rank.send(values, 1) } else { rank.receive(buffer, 0) };
                    assert_eq!(code, 0);
                }
            };
            if in_a_group {
                rank.together(calls)
            } else {
                calls()
            }
            assert!(rank.synchronize(PATIENCE));
            assert_eq!(buffers, if rank.rank == 0 { [[9.0; 3]; 4] } else { expected });
        }
    });
}

#[test]
fn a_message_to_the_own_rank_needs_both_halves_in_a_group() {
    ranks(1, true, |rank| {
        assert_eq!(rank.send(&[1.0], 0), Code::InvalidUsage as c_int);
        assert!(rank.text().contains("sends to itself"), "{}", rank.text());
    });
}

#[test]
fn nothing_starts_before_the_end_of_the_group() {
    ranks(2, false, |rank| {
        let (send, mut sums) = ([1.0; 5], [0.0; 5]);
        rank.together(|| {
            // Nothing is launched at the end of the inner group.
            assert_eq!(grouped(|| assert_eq!(rank.all_reduce(&send, &mut sums), 0)), 0);
            assert!(rank.synchronize(PATIENCE));
            assert_eq!(sums, [0.0; 5]);
        });
        assert!(rank.synchronize(PATIENCE));
        assert_eq!(sums, [2.0; 5]);
    });
}

#[test]
fn an_error_in_a_group_is_returned_at_its_end_and_nothing_starts() {
    ranks(1, true, |rank| {
        let mut sums = [0.0; 3];
        // SAFETY: the buffers live until the stream has executed the calls.
        unsafe {
            assert_eq!(ncclGroupStart(), 0);
            assert_eq!(rank.all_reduce(&[1.0; 3], &mut sums), 0);
            assert_eq!(rank.send(&[1.0], 1), Code::InvalidArgument as c_int);
            assert_eq!(ncclGroupEnd(), Code::InvalidArgument as c_int);
            assert!(rank.synchronize(PATIENCE));
            assert_eq!(sums, [0.0; 3]);
            assert_eq!(ncclGroupEnd(), Code::InvalidUsage as c_int);
        }
    });
}

#[test]
fn buffers_are_read_and_written_when_the_stream_reaches_the_call() {
    ranks(2, false, |rank| {
        let mut buffer = vec![0.0f32; 1000];
        let address = buffer.as_mut_ptr() as usize;
        let stream = rank.stream();
        let returned = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&returned);
        stream.push(move || {
            wait_until(|| is_over.load(Ordering::Acquire), "the call waits for the stream");
            // SAFETY: the buffer lives, and only the stream uses it.
            unsafe { std::slice::from_raw_parts_mut(address as *mut f32, 1000) }.fill(1.0);
        });
        let in_place = buffer.as_mut_ptr();
        rank.done(rank.reduce(in_place, in_place, 1000, F32, SUM));
        returned.store(true, Ordering::Release);
        stream.push(move || {
            // SAFETY: the buffer lives, and only the stream uses it.
            unsafe { std::slice::from_raw_parts_mut(address as *mut f32, 1000) }.iter_mut().for_each(|x| *x *= 10.0);
        });
        assert!(rank.synchronize(PATIENCE));
        assert_eq!(buffer, vec![20.0; 1000]);
    });
}

#[test]
fn calls_on_several_streams_keep_their_order() {
    ranks(2, false, |rank| {
        let (mut first, mut second, mut both) = ([0.0; 4], [0.0; 4], [0.0; 4]);
        let held = rank.hold();
        rank.done(rank.all_reduce(&[1.0; 4], &mut first));
        let other = Rank { comm: std::cell::Cell::new(rank.comm.get()), stream: new_stream(), ..*rank };
        rank.done(other.all_reduce(&[2.0; 4], &mut second));
        assert!(!other.synchronize(WHILE), "the second call ran before the first");
        drop(held);
        assert!(other.synchronize(PATIENCE));
        assert_eq!((first, second), ([2.0; 4], [4.0; 4]));
        // All streams of a group wait for the whole group, whichever is used first.
        for slow_is_first in [false, true] {
            let held = rank.hold();
            rank.together(|| {
                let streams = if slow_is_first { [rank, &other] } else { [&other, rank] };
                let buffers = [&mut second, &mut both];
                for (stream, buffer) in streams.into_iter().zip(buffers) {
                    assert_eq!(stream.all_reduce(&[3.0; 4], buffer), 0);
                }
            });
            assert!(!other.synchronize(WHILE), "a stream did not wait for the group's others");
            drop(held);
            assert!(other.synchronize(PATIENCE));
            assert!(rank.synchronize(PATIENCE));
            assert_eq!((second, both), ([6.0; 4], [6.0; 4]));
        }
        other.comm.set(std::ptr::null_mut());
    });
}
