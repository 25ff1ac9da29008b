//! Communicators: creation, splits and destruction.
use super::super::Code;
use super::support::*;
use std::ffi::c_int;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

#[test]
fn ids_differ() {
    let (a, b) = (super::super::connection::new_hub().unwrap(), super::super::connection::new_hub().unwrap());
    assert_ne!(a, b);
}

#[test]
fn a_communicator_is_in_progress_until_all_ranks_have_joined() {
    let id = id();
    let looked = AtomicBool::new(false);
    threads(2, |rank| {
        if rank == 1 {
            wait_until(|| looked.load(Ordering::Acquire), "rank 0 waits for rank 1");
        }
        let (code, rank) = begin(id, rank, 2, false);
        assert_eq!(code, Code::InProgress as c_int);
        // No operation is possible in the meantime.
        let mut count = 0;
        // SAFETY: the communicator is alive.
        assert_eq!(unsafe { ncclCommCount(rank.comm.get(), &raw mut count) }, Code::InvalidArgument as c_int);
        assert_eq!(rank.all_reduce(&[1.0], &mut [0.0]), Code::InvalidArgument as c_int);
        assert!(rank.text().contains("has not returned ncclSuccess yet"), "{}", rank.text());
        looked.store(true, Ordering::Release);
        assert_eq!(rank.settle(), 0);
        // SAFETY: the communicator is alive.
        assert_eq!(unsafe { ncclCommCount(rank.comm.get(), &raw mut count) }, 0);
        assert_eq!(count, 2);
    });
}

#[test]
fn a_call_can_be_made_when_the_one_before_has_settled() {
    ranks(2, false, |rank| {
        let mut buffers = [[0.0; 2]; 2];
        let [first, second] = &mut buffers;
        assert_eq!(rank.all_reduce(&[1.0; 2], first), Code::InProgress as c_int);
        assert_eq!(rank.all_reduce(&[1.0; 2], second), Code::InvalidArgument as c_int);
        assert_eq!(rank.settle(), 0);
        rank.done(rank.all_reduce(&[1.0; 2], second));
        assert!(rank.synchronize(PATIENCE));
        assert_eq!(buffers, [[2.0; 2]; 2]);
    });
}

#[test]
fn a_call_is_seen_in_progress_before_it_is_launched() {
    ranks(1, false, |rank| {
        let mut sums = [0.0];
        assert_eq!(rank.all_reduce(&[1.0], &mut sums), Code::InProgress as c_int);
        for _ in 0..3 {
            assert!(rank.synchronize(PATIENCE));
            assert_eq!(sums, [0.0], "the call is already on the stream");
            // SAFETY: the communicator is alive.
            assert_eq!(unsafe { async_error(rank.comm.get()) }, Code::InProgress as c_int);
        }
        assert_eq!(rank.settle(), 0);
        assert!(rank.synchronize(PATIENCE));
        assert_eq!(sums, [1.0]);
    });
}

#[test]
fn a_call_is_launched_without_polling() {
    ranks(2, false, |rank| {
        let mut sums = [0.0];
        assert_eq!(rank.all_reduce(&[1.0], &mut sums), Code::InProgress as c_int);
        std::thread::sleep(WHILE);
        assert!(rank.synchronize(PATIENCE));
        assert_eq!(sums, [2.0]);
    });
}

#[test]
fn one_thread_makes_all_ranks_in_a_group() {
    settle_down("host", 0, true);
    let id = id();
    let (mut made, mut sums) = (Vec::new(), [[0.0]; 2]);
    assert_eq!(grouped(|| made.extend((0..2).map(|rank| begin(id, rank, 2, true)))), 0);
    let calls = || {
        for ((code, rank), sums) in made.iter().zip(&mut sums) {
            assert_eq!(*code, 0);
            assert_eq!(rank.all_reduce(&[1.0], sums), 0);
        }
    };
    assert_eq!(grouped(calls), 0);
    made.iter().for_each(|(_, rank)| assert!(rank.synchronize(PATIENCE)));
    assert_eq!(sums, [[2.0]; 2]);
    // Aborted, because a rank that finalizes waits for the other.
    made.iter().for_each(|(_, rank)| rank.abort());
}

#[test]
fn splits_are_by_color_and_ordered_by_key() {
    for blocking in [true, false] {
        ranks(4, blocking, |rank| {
            // Ranks 3 and 1 in this order, 0 alone, 2 in none.
            let (color, key) = [(5, 0), (0, 9), (-1, 0), (0, 2)][rank.rank];
            let mut comm = std::ptr::dangling_mut();
            rank.done(rank.split(color, key, &mut comm));
            assert_eq!(comm.is_null(), rank.rank == 2);
            if rank.rank != 2 {
                let child = rank.child(comm);
                assert_eq!((child.rank, child.size), [(0, 1), (1, 2), (9, 9), (0, 2)][rank.rank]);
                let total = [0.0, 4.0, 9.0, 4.0][rank.rank];
                assert_eq!(child.sum(&[rank.rank as f32]), [total]);
            }
            assert_eq!(rank.sum(&[1.0]), [4.0]);
        });
    }
}

#[test]
fn equal_keys_keep_the_old_order() {
    ranks(3, true, |rank| {
        let mut comm = std::ptr::null_mut();
        rank.done(rank.split(1, 7, &mut comm));
        assert_eq!(rank.child(comm).rank, rank.rank);
    });
}

#[test]
fn a_communicator_with_running_calls_is_not_split() {
    ranks(1, true, |rank| {
        let held = rank.hold();
        let (mut comm, mut sums) = (std::ptr::null_mut(), [0.0]);
        rank.done(rank.all_reduce(&[1.0], &mut sums));
        assert_eq!(rank.split(0, 0, &mut comm), Code::InvalidUsage as c_int);
        drop(held);
        assert!(rank.synchronize(PATIENCE));
    });
}

#[test]
fn ranks_on_one_gpu_are_refused() {
    let make = |infos: [(&str, i32, bool); 2], blocking: bool| {
        let id = id();
        threads(2, |rank| {
            let (host, device, may_share) = infos[rank];
            settle_down(host, device, may_share);
            let (code, rank) = begin(id, rank, 2, blocking);
            let code = if blocking { code } else { rank.settle() };
            if code == 0 {
                assert_eq!(rank.sum(&[1.0]), [2.0]);
            } else {
                assert!(rank.text().contains("Duplicate GPU detected: rank 0 and rank 1"), "{}", rank.text());
                assert_eq!(rank.comm.get().is_null(), blocking);
                rank.abort();
            }
            code
        })
    };
    let refused = Code::InvalidUsage as c_int;
    for blocking in [true, false] {
        assert_eq!(make([("a", 3, false), ("a", 3, false)], blocking), [refused; 2]);
        assert_eq!(make([("a", 3, true), ("a", 3, false)], blocking), [refused; 2]);
        assert_eq!(make([("a", 3, true), ("a", 3, true)], blocking), [0; 2]);
        assert_eq!(make([("a", 3, false), ("b", 3, false)], blocking), [0; 2]);
        assert_eq!(make([("a", 3, false), ("a", 2, false)], blocking), [0; 2]);
    }
}

#[test]
fn the_same_rank_twice_is_refused() {
    let id = id();
    let codes = threads(2, |_| begin(id, 0, 2, true).0);
    assert_eq!(codes, [Code::InvalidUsage as c_int; 2]);
}

#[test]
fn invalid_arguments_are_refused() {
    settle_down("host", 0, false);
    let invalid = Code::InvalidArgument as c_int;
    assert_eq!([begin(id(), 2, 2, true).0, begin(id(), 0, 0, true).0], [invalid; 2]);
    // SAFETY: nothing is written before the arguments are checked.
    unsafe {
        assert_eq!(ncclCommFinalize(std::ptr::null_mut()), invalid);
        assert_eq!(ncclCommDestroy(std::ptr::null_mut()), 0);
    }
    let rank = Rank::connect(id(), 0, 1, true);
    let (send, mut receive) = ([1.0f32], [0.0f32]);
    let call = |dtype, op, stream| {
        // SAFETY: the buffers live until the stream has executed the calls.
        unsafe {
            let to = receive.as_mut_ptr().cast();
            ncclAllReduce(send.as_ptr().cast(), to, 1, dtype, op, rank.comm.get(), stream)
        }
    };
    let mut call = call;
    let no_stream = std::ptr::without_provenance_mut(12345);
    assert_eq!(call(10, SUM, rank.stream), invalid);
    assert_eq!(call(F32, 5, rank.stream), invalid);
    assert_eq!(call(F32, SUM, no_stream), Code::UnhandledCudaError as c_int);
    assert_eq!(call(F32, SUM, rank.stream), 0);
    assert!(rank.synchronize(PATIENCE));
}

#[test]
fn finalizing_flushes_and_waits_for_the_ranks_of_the_host() {
    for hosts in [["a", "a"], ["a", "b"]] {
        let (id, first_is_done) = (id(), Barrier::new(2));
        threads(2, |rank| {
            settle_down(hosts[rank], rank as i32, false);
            let rank = Rank::connect(id, rank, 2, false);
            let mut sums = [0.0];
            let held = rank.hold();
            rank.done(rank.all_reduce(&[1.0], &mut sums));
            if rank.rank == 0 {
                assert_eq!(rank.finalize(), Code::InProgress as c_int);
                drop(held);
                let start = Instant::now();
                if hosts[1] == "b" {
                    assert_eq!(rank.settle(), 0);
                    assert_eq!(sums, [2.0]);
                    rank.destroy();
                    first_is_done.wait();
                } else {
                    first_is_done.wait();
                    assert_eq!(rank.settle(), 0);
                    assert!(start.elapsed() >= WHILE, "rank 0 did not wait");
                    rank.destroy();
                }
            } else {
                drop(held);
                first_is_done.wait();
                std::thread::sleep(WHILE);
                // The end of the other rank is no error.
                assert_eq!(rank.settle(), 0);
            }
        });
    }
}

#[test]
fn a_communicator_is_destroyed_without_being_finalized() {
    for blocking in [true, false] {
        ranks(2, blocking, |rank| {
            let mut sums = [0.0];
            rank.stream().push(|| std::thread::sleep(Duration::from_millis(50)));
            rank.done(rank.all_reduce(&[1.0], &mut sums));
            rank.destroy();
            assert_eq!(sums, [2.0]);
        });
    }
}
