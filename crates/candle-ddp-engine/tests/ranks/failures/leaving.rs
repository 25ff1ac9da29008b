//! Ranks that leave, fail or die.
use super::*;

#[test]
fn a_rank_that_leaves_early_is_named() {
    let errors = on_ranks(3, |communicator| {
        communicator.run(all_reduce(10)).unwrap();
        communicator.run(all_reduce(10)).unwrap();
        (communicator.rank() != 2).then(|| until_failure(&communicator, all_reduce(11)))
    });
    for error in errors.into_iter().flatten() {
        let Error::Group(Failure::PeerLeft { peer: 2, left_after: 2, sequence: 3, .. }) = error else {
            panic!("{error:?}")
        };
        assert!(error.to_string().contains("cannot take part in all_reduce(f32[11]), sequence 3"), "{error}");
    }
}

/// The last collective's data is still in flight when the first ranks leave.
#[test]
fn leaving_after_the_last_collective_does_no_harm() {
    for round in 0..30 {
        let count = if round % 2 == 0 { 3 } else { 1 << 20 };
        let results = on_ranks(4, |communicator| {
            let tensor = Tensor::full(communicator.rank() as f32, count);
            if communicator.rank() == 3 {
                std::thread::sleep(Duration::from_millis(round));
            }
            communicator.run(Collective::Broadcast { tensor: tensor.clone(), root: 1 }).unwrap();
            drop(communicator);
            tensor
        });
        for tensor in results {
            assert!(tensor.values().iter().all(|value| *value == 1.0));
        }
    }
}

#[test]
fn a_message_sent_before_leaving_arrives() {
    let left = store();
    on_ranks(2, |communicator| {
        if communicator.rank() == 0 {
            communicator.run(Collective::Send { tensor: zeros(1000), peer: 1 }).unwrap();
            drop(communicator);
            left.set("rank 0", b"").unwrap();
            return;
        }
        left.get("rank 0").unwrap();
        let recv = || Collective::Recv { tensor: zeros(1000), peer: 0 };
        communicator.run(recv()).unwrap();
        let error = communicator.run(recv()).unwrap_err();
        assert!(
            matches!(error, Error::Group(Failure::PeerLeft { peer: 0, left_after: 1, sequence: 2, .. })),
            "{error:?}"
        );
    });
}

#[test]
fn a_rank_that_panics_is_named() {
    let store = store();
    std::thread::scope(|scope| {
        let rank = |rank| {
            let store = store.clone();
            scope.spawn(move || {
                let communicator = Rank::new(store.clone(), rank, 3, options_of(rank)).unwrap();
                communicator.run(all_reduce(10)).unwrap();
                store.set(&format!("done/{rank}"), b"").unwrap();
                if rank == 1 {
                    // The others may still be in the call.
                    store.wait(&["done/0", "done/2"], None).unwrap();
                    panic!("on purpose");
                }
                let error = until_failure(&communicator, all_reduce(10));
                assert_eq!(error.to_string(), "rank 1 ended the group: its thread panicked");
            })
        };
        let ranks: Vec<_> = (0..3).map(rank).collect();
        let panicked: Vec<bool> = ranks.into_iter().map(|rank| rank.join().is_err()).collect();
        assert_eq!(panicked, [false, true, false]);
    });
}

#[test]
fn abort_ends_a_call_in_flight_on_all_ranks() {
    on_ranks(3, |communicator| {
        std::thread::scope(|scope| {
            if communicator.rank() == 0 {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(100));
                    communicator.abort("loss is NaN");
                });
            }
            if communicator.rank() == 2 {
                // Rank 2 stays out of the collective, so that it cannot complete, and stays alive, so that no
                // connection closes.
                idle_until_failure(&communicator);
            }
            let error = until_failure(&communicator, all_reduce(1 << 20));
            assert_eq!(error.to_string(), "rank 0 ended the group: loss is NaN");
        });
    });
}

#[test]
fn abort_in_a_world_of_one() {
    on_ranks(1, |communicator| {
        communicator.run(all_reduce(5)).unwrap();
        communicator.abort("enough");
        assert_eq!(until_failure(&communicator, all_reduce(5)).to_string(), "rank 0 ended the group: enough");
    });
}

#[test]
fn a_rank_that_left_after_another_call_is_not_reported_dead() {
    let left = store();
    let errors = on_ranks(3, |communicator| {
        if communicator.rank() == 0 {
            // This sends nothing to rank 1.
            communicator.run(Collective::Gather { output: None, input: zeros(5), root: 2 }).unwrap();
            drop(communicator);
            left.set("rank 0", b"").unwrap();
            return None;
        }
        left.get("rank 0").unwrap();
        match communicator.rank() {
            1 => Some(until_failure(&communicator, broadcast(5, 0))),
            _ => {
                let output = Some(zeros(15));
                Some(until_failure(&communicator, Collective::Gather { output, input: zeros(5), root: 2 }))
            }
        }
    });
    for error in errors.into_iter().flatten() {
        assert!(
            matches!(error, Error::Group(Failure::Desync { sequence: 1, .. } | Failure::TimedOut { .. })),
            "{error:?}"
        );
        assert!(error.to_string().contains("broadcast(f32[5])") || error.to_string().contains("gather"), "{error}");
    }
}

/// Rank 2 waits for data from rank 1, which took part in rank 0's broadcast instead. Over some transports, only the time-out
/// reveals it.
#[test]
fn a_rank_that_left_after_another_call_is_not_reported_slow() {
    let left = store();
    let errors = on_hasty_ranks(3, |communicator| {
        let rank = communicator.rank();
        if rank < 2 {
            communicator.run(broadcast(5, 0)).unwrap();
            drop(communicator);
            left.set(&format!("rank {rank}"), b"").unwrap();
            return None;
        }
        left.wait(&["rank 0", "rank 1"], None).unwrap();
        Some(until_failure(&communicator, broadcast(5, 1)))
    });
    let error = errors[2].as_ref().unwrap();
    let Error::Group(Failure::Desync { sequence: 1, rank_a, rank_b, .. }) = error else { panic!("{error:?}") };
    assert_eq!(rank_a + rank_b, 3, "{error}");
    // Over some transports, rank 1's header also reveals its call.
    let text = error.to_string();
    assert!(text.contains("it has left since") || text.contains("broadcast(f32[5], root 0)"), "{text}");
}
