//! What ends a group, and what the ranks then say.
use crate::launch;
use candle_core::{DType, Device, Tensor};
use candle_ddp::backend::{Collective, Communicator};
use candle_ddp::{Error, ReduceOp, Result};
use candle_ddp_mpi::{MpiCommunicator, MpiOptions};
use std::time::Duration;

fn world(timeout: Duration) -> Result<MpiCommunicator> {
    MpiCommunicator::world(MpiOptions { timeout, ..MpiOptions::default() })
}

const LONG: Duration = Duration::from_secs(300);

fn tensor(count: usize) -> Tensor {
    Tensor::ones(count, DType::F32, &Device::Cpu).unwrap()
}

fn sum(count: usize) -> Collective {
    Collective::AllReduce { tensor: tensor(count), op: ReduceOp::Sum }
}

/// Runs `body` on so many ranks, all of which must print `expected`.
fn all_say(test: &str, count: usize, expected: &str, body: impl FnOnce() -> Result<()>) {
    let Some(output) = launch::outcome(test, count, body) else { return };
    let text = launch::text(&output);
    assert!(!output.status.success(), "{text}");
    assert_eq!(text.matches(expected).count(), count, "expected on {count} ranks: {expected}\n{text}");
}

#[test]
fn an_error_of_mpi_is_the_error_of_all_ranks() {
    let expected = "ended the group: recv(f32[3]): MPI_Irecv failed: ";
    all_say("failures::an_error_of_mpi_is_the_error_of_all_ranks", 3, expected, || {
        let engine = world(LONG)?;
        match engine.rank() {
            0 => engine.run(Collective::Send { tensor: tensor(10), peer: 1 })?,
            1 => engine.run(Collective::Recv { tensor: tensor(3), peer: 0 })?,
            _ => {}
        }
        engine.run(sum(5))
    });
}

#[test]
fn a_late_rank_ends_the_call_after_the_time_out() {
    let expected = "rank 0: all_reduce(f32[5]), sequence 2, timed out after 1s";
    all_say("failures::a_late_rank_ends_the_call_after_the_time_out", 2, expected, || {
        let engine = world(
            if std::env::var("OMPI_COMM_WORLD_RANK").or(std::env::var("PMI_RANK")).is_ok_and(|rank| rank == "0") {
                Duration::from_secs(1)
            } else {
                LONG
            },
        )?;
        engine.run(Collective::Barrier)?;
        if engine.rank() == 0 {
            return engine.run(sum(5));
        }
        // This rank learns of it by asking.
        loop {
            if let Some(error) = engine.failure() {
                return Err(error);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    });
}

#[test]
fn an_abort_reaches_a_rank_that_waits() {
    all_say("failures::an_abort_reaches_a_rank_that_waits", 3, "rank 2 ended the group: no data left", || {
        let engine = world(LONG)?;
        engine.run(Collective::Barrier)?;
        if engine.rank() == 2 {
            engine.abort("no data left");
        }
        let first = engine.start(sum(70_000)).and_then(|work| work.wait()).unwrap_err();
        let later = engine.run(Collective::Barrier).unwrap_err();
        assert_eq!(later.to_string(), first.to_string());
        Err(later)
    });
}

#[test]
fn a_rank_that_leaves_early_is_named() {
    let expected = "rank 1 left the group after sequence 1, so it cannot take part in all_reduce(f32[5]), sequence 2";
    let Some(output) = launch::outcome("failures::a_rank_that_leaves_early_is_named", 2, || {
        let engine = world(LONG)?;
        engine.run(Collective::Barrier)?;
        match engine.rank() {
            0 => engine.run(sum(5)),
            _ => Ok(()),
        }
    }) else {
        return;
    };
    let text = launch::text(&output);
    assert!(!output.status.success() && text.contains(expected), "{text}");
}

#[test]
fn what_cannot_be_sent_is_refused_and_the_group_goes_on() {
    launch::ranks("failures::what_cannot_be_sent_is_refused_and_the_group_goes_on", 2, || {
        let engine = world(LONG)?;
        let strided = Tensor::zeros((2, 3), DType::F32, &Device::Cpu)?.t()?;
        let refused = engine.run(Collective::AllReduce { tensor: strided, op: ReduceOp::Sum });
        assert!(matches!(refused, Err(Error::InvalidTensor { .. })), "{refused:?}");
        let none = engine.run(Collective::Broadcast { tensor: tensor(1), root: 2 });
        assert!(matches!(none, Err(Error::RankOutOfRange { rank: 2, world_size: 2 })), "{none:?}");
        assert!(engine.failure().is_none());
        engine.run(sum(5))
    });
}
