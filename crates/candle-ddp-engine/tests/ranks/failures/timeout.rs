//! Ranks that do not call in time.
use super::*;

#[test]
fn a_rank_that_does_not_call_is_named() {
    let errors = on_hasty_ranks(3, |communicator| {
        communicator.run(all_reduce(10)).unwrap();
        if communicator.rank() == 2 {
            // This rank is alive but makes no call; it gets the error at its next call.
            idle_until_failure(&communicator);
            return communicator.run(Collective::Barrier).unwrap_err();
        }
        until_failure(&communicator, broadcast(12, 2))
    });
    for error in errors {
        let Error::Group(Failure::TimedOut { sequence: 2, timeout: TIMEOUT, .. }) = error else { panic!("{error:?}") };
        let text = error.to_string();
        assert!(text.contains("broadcast(f32[12]), sequence 2, timed out after 4s"), "{text}");
        assert!(
            text.contains("rank 2 has not started this collective: its last was sequence 1, all_reduce(f32[10])"),
            "{text}"
        );
    }
}

#[test]
fn a_message_that_is_not_sent_times_out() {
    side_by_side([0, 2], |receiver| {
        let errors = on_hasty_ranks(3, |communicator| {
            if communicator.rank() == receiver {
                return until_failure(&communicator, Collective::Recv { tensor: zeros(4), peer: 1 });
            }
            idle_until_failure(&communicator);
            communicator.run(Collective::Barrier).unwrap_err()
        });
        for error in errors {
            let text = error.to_string();
            assert!(text.contains(&format!("rank {receiver}: recv(f32[4]), sequence 1, timed out")), "{text}");
            assert!(text.contains("rank 1 did not make the matching call"), "{text}");
        }
    });
}

/// Rank 0 has messages with both others, of which only rank 1 takes part.
#[test]
fn a_message_of_a_batch_that_is_not_sent_times_out() {
    let errors = on_hasty_ranks(3, |communicator| {
        let recv = |peer| Collective::Recv { tensor: zeros(4), peer };
        let batch = match communicator.rank() {
            0 => vec![recv(1), recv(2)],
            1 => vec![Collective::Send { tensor: zeros(4), peer: 0 }],
            _ => Vec::new(),
        };
        let ended = communicator.run_batch(batch);
        ended.err().unwrap_or_else(|| {
            idle_until_failure(&communicator);
            communicator.run(Collective::Barrier).unwrap_err()
        })
    });
    for error in errors {
        let text = error.to_string();
        assert!(text.contains("rank 0: recv(f32[4]) for batch_isend_irecv, sequence 1, timed out"), "{text}");
        assert!(text.contains("rank 2 did not make the matching call"), "{text}");
    }
}

/// Dropping a communicator must not hang, even if its calls cannot complete.
#[test]
fn dropping_with_work_in_flight_ends_in_time() {
    let errors = on_hasty_ranks(2, |communicator| {
        if communicator.rank() == 0 {
            for _ in 0..5 {
                drop(communicator.start(all_reduce(4)).unwrap());
            }
            drop(communicator);
            return None;
        }
        idle_until_failure(&communicator);
        Some(communicator.run(Collective::Barrier).unwrap_err())
    });
    let error = errors.into_iter().flatten().next().unwrap();
    // Rank 0's first call timed out, or rank 0 left with calls in flight, whichever came first.
    assert!(matches!(error, Error::Group(Failure::TimedOut { .. } | Failure::PeerFailed { peer: 0, .. })), "{error:?}");
}
