//! The same bits, whoever computes them, and when.
use crate::Engine;
use candle_core::{DType, Tensor};
use candle_ddp::ReduceOp;
use candle_ddp::backend::Collective;

/// Values of many magnitudes from a linear congruential generator, so that the order of additions shows in the bits.
fn random(seed: usize, count: usize) -> Vec<f32> {
    let mut state = seed as u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..count).map(|_| next() * 10_f32.powf(next() * 8.0)).collect()
}

/// The bits of bf16 and f32 fit into f32.
fn bits(tensor: &Tensor) -> Vec<u32> {
    let values: Vec<f32> = tensor.to_dtype(DType::F32).unwrap().to_vec1().unwrap();
    values.into_iter().map(f32::to_bits).collect()
}

const COUNT: usize = 40_000;

fn all_reduce(engine: &Engine, world_size: usize, dtype: DType, count: usize) -> Vec<Vec<u32>> {
    engine.on_ranks(world_size, |communicator| {
        let mut values = random(communicator.rank() + 1, COUNT);
        values.truncate(count);
        let tensor = Tensor::from_vec(values, count, &engine.device).unwrap().to_dtype(dtype).unwrap();
        communicator.run(Collective::AllReduce { tensor: tensor.clone(), op: ReduceOp::Sum }).unwrap();
        bits(&tensor)
    })
}

pub(crate) fn bits_are_equal_on_all_ranks_and_from_run_to_run(engine: &Engine) {
    for (world_size, dtype) in [(3, DType::F32), (4, DType::BF16), (7, DType::F32)] {
        let first = all_reduce(engine, world_size, dtype, COUNT);
        for rank in &first {
            assert!(*rank == first[0], "{}: ranks differ in a world of {world_size}, {dtype:?}", engine.name);
        }
        for _ in 0..3 {
            let again = all_reduce(engine, world_size, dtype, COUNT);
            assert!(again == first, "{}: runs differ in a world of {world_size}, {dtype:?}", engine.name);
        }
    }
}

/// An element's result depends on its values alone: neither on the size of the message nor on the chunk it is in. Here
/// that is the sum in rank order on each host, rounded, and then that of the hosts' sums.
pub(crate) fn bits_do_not_depend_on_where_an_element_stands(engine: &Engine) {
    let world_size = 5;
    let mut hosts: Vec<Vec<usize>> = Vec::new();
    for rank in 0..world_size {
        match hosts.iter_mut().find(|ranks| (engine.host)(ranks[0]) == (engine.host)(rank)) {
            Some(ranks) => ranks.push(rank),
            None => hosts.push(vec![rank]),
        }
    }
    let rounded = |values: Vec<f32>, dtype: DType| {
        Tensor::from_vec(values, COUNT, &candle_core::Device::Cpu).unwrap().to_dtype(dtype).unwrap()
    };
    let sum = |parts: Vec<Vec<f32>>| -> Vec<f32> {
        (0..COUNT).map(|index| parts.iter().skip(1).fold(parts[0][index], |sum, part| sum + part[index])).collect()
    };
    for dtype in [DType::F32, DType::BF16] {
        let values = |values, dtype| rounded(values, dtype).to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
        let of_rank = |rank: &usize| values(random(rank + 1, COUNT), dtype);
        let of_host = |ranks: &Vec<usize>| values(sum(ranks.iter().map(of_rank).collect()), dtype);
        let sums = rounded(sum(hosts.iter().map(of_host).collect()), dtype);
        let expected = bits(&sums);
        for count in [5, 1000, COUNT] {
            for rank in all_reduce(engine, world_size, dtype, count) {
                assert!(rank == expected[..count], "{}: {dtype:?}[{count}]", engine.name);
            }
        }
    }
}
