//! The effect of a rank's end on the others, and mismatched calls.
use super::super::Code;
use super::super::peer_info::PRETENDED;
use super::support::*;
use std::ffi::{c_int, c_void};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};

const REMOTE: c_int = Code::RemoteError as c_int;

#[test]
fn an_abort_is_an_error_for_the_others() {
    // The culprit is the rank in whose process the hub is, or another one.
    for (blocking, culprit) in [(true, 0), (false, 0), (true, 2), (false, 2)] {
        // The survivors abort as well, and other ranks must hear of the culprit first.
        let heard = Barrier::new(2);
        ranks(3, blocking, |rank| {
            if rank.rank == culprit {
                rank.abort();
                return;
            }
            let (code, text) = rank.await_error();
            heard.wait();
            assert_eq!(code, REMOTE);
            assert!(text.contains(&format!("rank {culprit} has closed")), "{text}");
            // No further operation is possible.
            assert_eq!(rank.all_reduce(&[1.0], &mut [0.0]), REMOTE);
            rank.abort();
        });
    }
}

#[test]
fn a_call_hangs_after_an_error_until_it_is_aborted() {
    ranks(2, false, |rank| {
        if rank.rank == 1 {
            std::thread::sleep(WHILE);
            rank.abort();
            return;
        }
        let mut sums = [7.0];
        rank.done(rank.all_reduce(&[1.0], &mut sums));
        assert_eq!(rank.await_error().0, REMOTE);
        assert!(!rank.synchronize(WHILE), "a call that cannot complete looks complete");
        rank.abort();
        assert!(rank.synchronize(PATIENCE));
        assert_eq!(sums, [7.0]);
    });
}

#[test]
fn an_abort_waits_for_the_kernels_of_other_communicators() {
    let (ids, done) = ([id(), id()], Barrier::new(2));
    threads(2, |rank| {
        // Rank 0's streams are those of a GPU that no other test uses; rank 1 has another one, and does not come.
        let context = (rank == 0).then_some(1);
        // SAFETY: the context is that of the second device.
        unsafe { crate::driver::cuCtxSetCurrent(std::ptr::without_provenance_mut(2)) };
        PRETENDED.with_borrow_mut(|info| info.as_mut().unwrap().context = context);
        let [first, second] = ids.map(|id| Rank::connect(id, rank, 2, false));
        if rank == 1 {
            done.wait();
            return [first, second].iter().for_each(Rank::abort);
        }
        let (mut sums, mut others) = ([0.0], [0.0]);
        first.done(first.all_reduce(&[1.0], &mut sums));
        second.done(second.all_reduce(&[1.0], &mut others));
        let (handle, ended) = (first.comm.replace(std::ptr::null_mut()) as usize, AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // SAFETY: the communicator is alive, and no longer used.
                assert_eq!(unsafe { ncclCommAbort(handle as *mut c_void) }, 0);
                ended.store(true, Ordering::Release);
            });
            std::thread::sleep(WHILE);
            assert!(!ended.load(Ordering::Acquire), "the abort did not wait for the other communicator");
            second.abort();
        });
        assert!(ended.into_inner());
        done.wait();
    });
}

#[test]
fn a_rank_that_leaves_before_all_have_joined_is_an_error() {
    let (id, gone) = (id(), Barrier::new(3));
    threads(3, |rank| {
        if rank == 2 {
            gone.wait();
        }
        let (_, rank) = begin(id, rank, 3, false);
        match rank.rank {
            0 => {
                std::thread::sleep(WHILE);
                rank.abort();
                gone.wait();
            }
            1 => {
                gone.wait();
                assert_eq!(rank.await_error().0, REMOTE);
                rank.abort();
            }
            _ => {
                // The error arrives after everything has ended.
                assert_eq!(rank.await_error().0, REMOTE);
                rank.abort();
            }
        }
    });
}

#[test]
fn a_construction_is_aborted_while_others_are_missing() {
    settle_down("host", 0, false);
    let (code, rank) = begin(id(), 0, 2, false);
    assert_eq!(code, Code::InProgress as c_int);
    std::thread::sleep(WHILE);
    rank.abort();
}

type Buffers = (*const f32, *mut f32);

/// Rank 1 makes a different call than rank 0, which all-reduces three floats.
fn assert_hangs(call: impl Fn(&Rank, Buffers) -> c_int + Sync) {
    ranks(2, false, |rank| {
        // The buffers are large enough for all calls.
        let (send, mut receive) = ([1.0f32; 8], [5.0f32; 8]);
        let buffers @ (from, to) = (send.as_ptr(), receive.as_mut_ptr());
        rank.done(if rank.rank == 0 { rank.reduce(from, to, 3, F32, SUM) } else { call(rank, buffers) });
        assert!(!rank.synchronize(WHILE), "mismatched calls have completed");
        assert_eq!(rank.settle(), 0);
        // The next, matching calls do not complete either.
        rank.done(rank.reduce(from, to, 3, F32, SUM));
        assert!(!rank.synchronize(WHILE));
        rank.abort();
        assert!(rank.synchronize(PATIENCE));
        assert_eq!(receive, [5.0; 8]);
    });
}

#[test]
fn mismatched_calls_hang_until_they_are_aborted() {
    const I32: c_int = 2;
    const MAX: c_int = 2;
    for (count, dtype, op) in [(4, F32, SUM), (3, I32, SUM), (3, F32, MAX)] {
        assert_hangs(|rank, (send, receive)| rank.reduce(send, receive, count, dtype, op));
    }
    assert_hangs(|rank, (send, receive)| {
        // SAFETY: the buffers live until the stream has executed the call.
        unsafe { ncclBroadcast(send.cast(), receive.cast(), 3, F32, 0, rank.comm.get(), rank.stream) }
    });
    assert_hangs(|rank, (send, _)| {
        // SAFETY: the buffers live until the stream has executed the call.
        unsafe { ncclSend(send.cast(), 3, F32, 0, rank.comm.get(), rank.stream) }
    });
}

#[test]
fn different_roots_do_not_match() {
    ranks(2, true, |rank| {
        let mut buffer = [5.0f32; 3];
        let address = buffer.as_mut_ptr();
        // SAFETY: the buffer lives until the stream has executed the call.
        rank.done(unsafe {
            let root = rank.rank as c_int;
            ncclBroadcast(address.cast(), address.cast(), 3, F32, root, rank.comm.get(), rank.stream)
        });
        assert!(!rank.synchronize(WHILE));
        rank.abort();
        assert!(rank.synchronize(PATIENCE));
    });
}

#[test]
fn pending_calls_end_with_an_abort() {
    let called = Barrier::new(2);
    ranks(2, true, |rank| {
        let mut sums = [5.0; 3];
        rank.stream().push(|| std::thread::sleep(WHILE));
        rank.done(rank.all_reduce(&[1.0; 3], &mut sums));
        called.wait();
        rank.abort();
        assert!(rank.synchronize(PATIENCE));
        assert_eq!(sums, [5.0; 3]);
    });
}
