//! Calls in flight.
use crate::Engine;
use candle_core::{DType, Tensor};
use candle_ddp::ReduceOp;
use candle_ddp::backend::{Collective, Communicator};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

fn filled(engine: &Engine, value: f64, count: usize) -> Tensor {
    Tensor::full(value as f32, count, &engine.device).unwrap()
}

fn sum(tensor: &Tensor) -> Collective {
    Collective::AllReduce { tensor: tensor.clone(), op: ReduceOp::Sum }
}

fn assert_all(tensor: &Tensor, expected: f64) {
    let values: Vec<f32> = tensor.to_dtype(DType::F32).unwrap().to_vec1().unwrap();
    assert!(values.iter().all(|value| f64::from(*value) == expected), "{expected} expected: {:?}", &values[..3]);
}

pub(crate) fn works_are_carried_out_in_order_and_waited_for_out_of_order(engine: &Engine) {
    engine.on_ranks(3, |communicator| {
        for round in 0..5 {
            let tensors: Vec<Tensor> =
                (0..20).map(|index| filled(engine, f64::from(index), 1 + 977 * index as usize)).collect();
            let start = |tensor| communicator.start(sum(tensor)).unwrap();
            let works: Vec<_> = tensors.iter().map(start).collect();
            // On the same tensors again: three times three.
            let more: Vec<_> = tensors.iter().map(start).collect();
            for index in (0..20).rev() {
                more[index].wait().unwrap();
                assert!(works[index].is_completed(), "round {round}: a later call was over before an earlier one");
                works[index].wait().unwrap();
                assert_all(&tensors[index], 9.0 * index as f64);
            }
        }
    });
}

pub(crate) fn dropped_works_are_carried_out(engine: &Engine) {
    let results = engine.on_ranks(3, |communicator| {
        let tensor = filled(engine, 1.0, 5000);
        for _ in 0..4 {
            drop(communicator.start(sum(&tensor)).unwrap());
        }
        tensor
        // The communicator waits for them when it is dropped.
    });
    results.iter().for_each(|tensor| assert_all(tensor, 81.0));
}

pub(crate) fn run_comes_after_what_was_started(engine: &Engine) {
    engine.on_ranks(2, |communicator| {
        let tensor = filled(engine, 1.0, 10_000);
        for _ in 0..10 {
            let work = communicator.start(sum(&tensor)).unwrap();
            communicator.run(sum(&tensor)).unwrap();
            assert!(work.is_completed());
        }
        assert_all(&tensor, f64::from(1 << 20));
    });
}

pub(crate) fn messages_do_not_wait_for_collectives(engine: &Engine) {
    engine.on_ranks(2, |communicator| {
        let (tensor, message) = (filled(engine, 1.0, 100), filled(engine, 7.0 * communicator.rank() as f64, 100));
        if communicator.rank() == 0 {
            // Rank 1 joins this only after it has received the message.
            let work = communicator.start(sum(&tensor)).unwrap();
            communicator.run(Collective::Recv { tensor: message.clone(), peer: 1 }).unwrap();
            communicator.run(Collective::Send { tensor: message, peer: 1 }).unwrap();
            work.wait().unwrap();
        } else {
            communicator.run(Collective::Send { tensor: message.clone(), peer: 0 }).unwrap();
            communicator.run(Collective::Recv { tensor: message.clone(), peer: 0 }).unwrap();
            assert_all(&message, 7.0);
            communicator.run(sum(&tensor)).unwrap();
        }
        assert_all(&tensor, 2.0);
    });
}

/// More than any socket's buffers hold, in both directions at once, started before anything is received.
pub(crate) fn large_messages_cross(engine: &Engine) {
    const COUNT: usize = 8 << 20;
    engine.on_ranks(2, |communicator| {
        let (rank, peer) = (communicator.rank(), 1 - communicator.rank());
        let sent = filled(engine, rank as f64, COUNT);
        let received = filled(engine, 9.0, COUNT);
        let work = communicator.start(Collective::Send { tensor: sent, peer }).unwrap();
        communicator.run(Collective::Recv { tensor: received.clone(), peer }).unwrap();
        work.wait().unwrap();
        assert_all(&received, peer as f64);
    });
}

pub(crate) fn a_barrier_holds_everybody_back(engine: &Engine) {
    let come = AtomicUsize::new(0);
    engine.on_ranks(4, |communicator: &dyn Communicator| {
        for round in 1..=5 {
            if communicator.rank() == round % 4 {
                std::thread::sleep(Duration::from_millis(20));
            }
            come.fetch_add(1, Ordering::SeqCst);
            communicator.run(Collective::Barrier).unwrap();
            assert!(come.load(Ordering::SeqCst) >= 4 * round, "round {round}");
        }
    });
}
