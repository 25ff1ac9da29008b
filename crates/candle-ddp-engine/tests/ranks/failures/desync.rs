//! Ranks that make different calls: all fail, and the message names both sides' calls.
use super::*;

type Make = fn() -> Collective;

/// Rank 0 and rank 1 of `world_size` make the given calls at sequence 4; the other ranks make rank 0's.
fn disagree(world_size: usize, rank_0: Make, rank_1: Make) -> Vec<Error> {
    on_hasty_ranks(world_size, |communicator| {
        for _ in 0..3 {
            // The others may already have failed while a slow rank is still finishing an earlier call.
            if let Err(error) = communicator.run(all_reduce(10)) {
                return error;
            }
        }
        let call = if communicator.rank() == 1 { rank_1() } else { rank_0() };
        until_failure(&communicator, call)
    })
}

/// Checks that every rank's error begins with this text.
#[track_caller]
fn all_begin(errors: &[Error], text: &str) {
    assert!(errors.iter().all(|error| error.to_string().starts_with(text)), "{errors:?}");
}

fn max() -> Collective {
    Collective::AllReduce { tensor: zeros(20), op: ReduceOp::Max }
}

fn f64s() -> Collective {
    Collective::AllReduce { tensor: Tensor::zeros_f64(20), op: ReduceOp::Sum }
}

fn shaped(shape: &[usize]) -> Tensor {
    Tensor::shaped(shape)
}

fn reduce(root: usize) -> Collective {
    Collective::Reduce { tensor: zeros(8), root, op: ReduceOp::Sum }
}

#[test]
fn all_ranks_name_both_calls() {
    // Rank 0's call, rank 1's call, and how the message names each.
    let cases: &[(Make, Make, &str, &str)] = &[
        (|| broadcast(10, 0), || all_reduce(20), "broadcast(f32[10])", "all_reduce(f32[20])"),
        (|| all_reduce(20), || broadcast(10, 0), "all_reduce(f32[20])", "broadcast(f32[10])"),
        (|| all_reduce(20), || broadcast(10, 1), "all_reduce(f32[20])", "broadcast(f32[10])"),
        (|| all_reduce(20), || all_reduce(21), "all_reduce(f32[20])", "all_reduce(f32[21])"),
        (|| all_reduce(200_000), || all_reduce(200), "all_reduce(f32[200000])", "all_reduce(f32[200])"),
        (|| all_reduce(20), f64s, "all_reduce(f32[20])", "all_reduce(f64[20])"),
        (|| all_reduce(20), max, "all_reduce(f32[20], sum)", "all_reduce(f32[20], max)"),
        (|| broadcast(8, 0), || broadcast(8, 1), "broadcast(f32[8], root 0)", "broadcast(f32[8], root 1)"),
        (|| broadcast(8, 1), || broadcast(8, 0), "broadcast(f32[8], root 1)", "broadcast(f32[8], root 0)"),
        (|| Collective::Barrier, || all_reduce(0), "barrier()", "all_reduce(f32[0])"),
        (|| broadcast(1 << 20, 0), || broadcast(1 << 20, 1), "broadcast(f32[1048576], root 0)", "root 1)"),
        (|| reduce(1), || Collective::Barrier, "reduce(f32[8])", "barrier()"),
        (|| reduce(0), || reduce(1), "reduce(f32[8], sum, root 0)", "reduce(f32[8], sum, root 1)"),
        (
            || Collective::AllReduce { tensor: shaped(&[2, 3]), op: ReduceOp::Sum },
            || Collective::AllReduce { tensor: shaped(&[3, 2]), op: ReduceOp::Sum },
            "all_reduce(f32[2, 3])",
            "all_reduce(f32[3, 2])",
        ),
        (
            || Collective::Broadcast { tensor: shaped(&[2, 3]), root: 0 },
            || Collective::Broadcast { tensor: shaped(&[3, 2]), root: 0 },
            "broadcast(f32[2, 3])",
            "broadcast(f32[3, 2])",
        ),
    ];
    // Where no rank sends, or none receives, the time-out ends the calls: two cases after each other, of which at most one waits for
    // it, and all pairs together.
    let some = |world_size| cases.chunks(2).map(move |cases| (world_size, cases));
    side_by_side(some(2).chain(some(4)), |(world_size, cases)| {
        for (rank_0, rank_1, text_0, text_1) in cases {
            for error in disagree(world_size, *rank_0, *rank_1) {
                let Error::Group(Failure::Desync { sequence: 4, rank_a, rank_b, .. }) = error else {
                    panic!("{error:?}")
                };
                assert!(rank_a > rank_b && [rank_a, rank_b].contains(&1), "{error}");
                let text = error.to_string();
                assert!(text.contains(text_1) && text.contains(text_0), "{text}");
            }
        }
    });
    // The full text of an error.
    let error = &disagree(2, || all_reduce(20), || broadcast(10, 0))[1];
    assert_eq!(
        error.to_string(),
        "rank 1 called broadcast(f32[10]) where rank 0 called all_reduce(f32[20]), sequence 4: \
         all ranks of a group must make the same calls in the same order. Look for a call that only some ranks make, such as one \
         inside `if rank == 0`"
    );
}

/// Rank 1 gathers to rank 2, which returns at once, and continues; the others all-reduce.
#[test]
fn a_rank_that_is_ahead_is_asked_what_it_called() {
    let errors = on_ranks(3, |communicator| {
        if communicator.rank() == 1 {
            // Rank 1 sends nothing to rank 0 at sequence 1, but does at sequence 2.
            communicator.run(Collective::Gather { output: None, input: zeros(5), root: 2 }).unwrap();
        }
        until_failure(&communicator, all_reduce(7))
    });
    for error in errors {
        let text = error.to_string();
        assert!(
            text.contains("rank 1 called gather(f32[5])") || text.contains("where rank 1 called gather(f32[5])"),
            "{text}"
        );
        assert!(
            text.contains("all_reduce(f32[7]), sequence 1") || text.contains("called all_reduce(f32[7])"),
            "{text}"
        );
    }
}

/// Both ranks wait and none sends, so only the time-out reveals the mismatch.
#[test]
fn ranks_that_all_wait_are_told_why() {
    let errors = on_hasty_ranks(2, |communicator| {
        let root = 1 - communicator.rank();
        until_failure(&communicator, broadcast(6, root))
    });
    let text = "rank 1 called broadcast(f32[6], root 0) where rank 0 called broadcast(f32[6], root 1), sequence 1";
    all_begin(&errors, text);
}

#[test]
fn queued_calls_fail_too() {
    on_ranks(2, |communicator| {
        let works: Vec<_> = (0..5)
            .map(|index| communicator.start(all_reduce(if index == 2 { 10 + communicator.rank() } else { 5 })))
            .map_while(|work| work.ok())
            .collect();
        let results: Vec<_> = works.iter().map(|work| work.wait()).collect();
        assert!(results[..2].iter().all(|result| result.is_ok()), "{results:?}");
        assert!(works.iter().all(|work| work.is_completed()));
        for result in &results[2..] {
            assert!(matches!(result, Err(Failure::Desync { sequence: 3, .. })), "{result:?}");
        }
    });
}

#[test]
fn messages_must_match() {
    let errors = on_ranks(3, |communicator| {
        communicator.run(Collective::Barrier).unwrap();
        let call = match communicator.rank() {
            0 => Collective::Recv { tensor: zeros(10), peer: 1 },
            1 => Collective::Send { tensor: zeros(20), peer: 0 },
            _ => Collective::Barrier,
        };
        until_failure(&communicator, call)
    });
    all_begin(&errors, "rank 1 called send(f32[20]) where rank 0 called recv(f32[10]), sequence 1");
}

/// A buffer takes values of any shape, and dimensions of size 1 do not matter; otherwise shapes are the same on all ranks.
#[test]
fn shapes_match_that_put_each_element_in_the_same_place() {
    on_ranks(3, |communicator| {
        let rank = communicator.rank();
        let own = || shaped([&[2, 3][..], &[6], &[2, 1, 3]][rank]);
        let all = || zeros(18);
        for collective in [
            Collective::AllReduce { tensor: own(), op: ReduceOp::Sum },
            Collective::Broadcast { tensor: own(), root: 1 },
            Collective::Reduce { tensor: own(), root: 2, op: ReduceOp::Max },
            Collective::AllGather { output: all(), input: own() },
            Collective::ReduceScatter { output: own(), input: all(), op: ReduceOp::Sum },
            Collective::Gather { output: (rank == 0).then(all), input: own(), root: 0 },
            Collective::Scatter { output: own(), input: (rank == 0).then(all), root: 0 },
        ] {
            communicator.run(collective).unwrap();
        }
    });
}

#[test]
fn messages_have_one_shape_on_both_sides() {
    let errors = on_ranks(2, |communicator| {
        let call = |shape: &[usize]| match communicator.rank() {
            0 => Collective::Recv { tensor: shaped(shape), peer: 1 },
            _ => Collective::Send { tensor: shaped(shape), peer: 0 },
        };
        communicator.run(call(if communicator.rank() == 0 { &[6] } else { &[3, 2] })).unwrap();
        until_failure(&communicator, call(if communicator.rank() == 0 { &[2, 3] } else { &[3, 2] }))
    });
    all_begin(&errors, "rank 1 called send(f32[3, 2]) where rank 0 called recv(f32[2, 3]), sequence 2");
}

#[test]
fn messages_of_batches_must_match() {
    let errors = on_ranks(3, |communicator| {
        let (send, recv) = (
            |count, peer| Collective::Send { tensor: zeros(count), peer },
            |count, peer| Collective::Recv { tensor: zeros(count), peer },
        );
        let batch = match communicator.rank() {
            0 => vec![send(4, 2), recv(10, 1)],
            1 => vec![send(4, 2), send(20, 0)],
            _ => vec![recv(4, 1), recv(4, 0)],
        };
        let ended = communicator.run_batch(batch);
        ended.err().unwrap_or_else(|| until_failure(&communicator, Collective::Barrier))
    });
    let text = "rank 1 called send(f32[20]) for batch_isend_irecv where rank 0 called recv(f32[10]) for batch_isend_irecv, sequence 1";
    all_begin(&errors, text);
}
