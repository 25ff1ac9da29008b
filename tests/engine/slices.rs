//! Slices of one tensor in several calls at once.
use crate::Engine;
use candle_core::{DType, Tensor};
use candle_ddp::backend::Collective;
use candle_ddp::{Error, ReduceOp};

/// Worlds and counts of elements: few, and more than slots and segments hold.
fn cases(engine: &Engine) -> [(usize, usize); 3] {
    let many = if engine.name == "in tiny segments" { 500 } else { 1 << 18 };
    [(2, 10), (2, many), (3, many)]
}

fn ramp(engine: &Engine, from: usize, count: usize) -> Tensor {
    let ramp = Tensor::arange(0, count as u32, &engine.device).unwrap();
    (ramp.to_dtype(DType::F32).unwrap() + from as f64).unwrap()
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.to_vec1().unwrap()
}

/// Each rank sends the inner part of its tensor to the next rank, which receives it into the part before.
pub(crate) fn halos_are_exchanged(engine: &Engine) {
    for (world_size, count) in cases(engine) {
        engine.on_ranks(world_size, |communicator| {
            let rank = communicator.rank();
            let (left, right) = ((rank + world_size - 1) % world_size, (rank + 1) % world_size);
            let field = ramp(engine, 1000 * rank, 3 * count);
            let expected = values(&ramp(engine, 1000 * left + count, count));
            let part = |index: usize| field.narrow(0, index * count, count).unwrap();
            let halo = communicator.start(Collective::Recv { tensor: part(0), peer: left }).unwrap();
            let inner = communicator.start(Collective::Send { tensor: part(1), peer: right }).unwrap();
            halo.wait().unwrap();
            inner.wait().unwrap();
            assert!(values(&part(0)) == expected, "rank {rank} of {world_size}, {count} elements");
            assert!(values(&part(2)) == values(&ramp(engine, 1000 * rank + 2 * count, count)));
        });
    }
}

pub(crate) fn halves_are_reduced_in_two_groups_in_any_order(engine: &Engine) {
    for (world_size, count) in cases(engine) {
        engine.in_two_groups(world_size, |groups| {
            let rank = groups[0].rank();
            let whole = Tensor::full(rank as f32 + 1.0, 2 * count, &engine.device).unwrap();
            let order = if rank == 0 { [0, 1] } else { [1, 0] };
            let works = order.map(|half| {
                let (tensor, op) =
                    (whole.narrow(0, half * count, count).unwrap(), [ReduceOp::Sum, ReduceOp::Max][half]);
                groups[half].start(Collective::AllReduce { tensor, op }).unwrap()
            });
            works.iter().for_each(|work| work.wait().unwrap());
            let (sum, max) = ((world_size * (world_size + 1) / 2) as f32, world_size as f32);
            let values = values(&whole);
            assert!(values[..count].iter().all(|value| *value == sum), "rank {rank}, {count} elements");
            assert!(values[count..].iter().all(|value| *value == max), "rank {rank}, {count} elements");
        });
    }
}

pub(crate) fn overlapping_slices_are_refused_while_one_is_in_flight(engine: &Engine) {
    engine.in_two_groups(2, |[first, second]| {
        let (rank, peer) = (first.rank(), 1 - first.rank());
        let tensor = ramp(engine, 0, 30);
        let part = |start: usize| tensor.narrow(0, start, 10).unwrap();
        let received = first.start(Collective::Recv { tensor: part(0), peer }).unwrap();
        let send = |start| Collective::Send { tensor: part(start), peer };
        let reduce = |start| Collective::AllReduce { tensor: part(start), op: ReduceOp::Sum };
        // What each receives is only sent after both have been refused.
        let refusals = [
            first.run(send(9)).err(),
            first.start(send(5)).err(),
            first.run(reduce(0)).err(),
            second.start(reduce(1)).err(),
        ];
        for refusal in refusals {
            let Some(Error::InvalidTensor { rank: named, .. }) = refusal else { panic!("{refusal:?}") };
            let text = refusal.map(|error| error.to_string()).unwrap();
            assert_eq!(named, rank);
            assert!(text.contains("f32[10] overlaps the tensor of recv(f32[10]), which rank"), "{text}");
            assert!(text.contains("wait for that call before this one, or use slices that do not overlap"), "{text}");
        }
        second.run(Collective::Barrier).unwrap();
        // Two may read at once, and neighbours may be sent; calls of one channel follow each other.
        let more = [first.start(send(10)).unwrap(), second.start(send(15)).unwrap()];
        second.run(Collective::Recv { tensor: ramp(engine, 0, 10), peer }).unwrap();
        for work in more.iter().chain([&received]) {
            work.wait().unwrap();
        }
        // All are over.
        first.run(reduce(5)).unwrap();
    });
}

/// This rank's part of the output is its input.
pub(crate) fn gathers_in_place(engine: &Engine) {
    for (world_size, count) in cases(engine) {
        engine.on_ranks(world_size, |communicator| {
            let rank = communicator.rank();
            let output = Tensor::zeros(world_size * count, DType::F32, &engine.device).unwrap();
            let input = output.narrow(0, rank * count, count).unwrap();
            output.slice_set(&ramp(engine, rank, count), 0, rank * count).unwrap();
            communicator.run(Collective::AllGather { output: output.clone(), input }).unwrap();
            let expected: Vec<f32> = (0..world_size).flat_map(|rank| values(&ramp(engine, rank, count))).collect();
            assert!(values(&output) == expected, "rank {rank} of {world_size}, {count} elements");
        });
    }
}
