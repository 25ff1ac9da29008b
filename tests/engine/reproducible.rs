//! Results are bit-identical on all ranks and in all runs.
use crate::common::bits;
use crate::engine::Engine;
use candle_core::{DType, Device, Tensor};
use candle_ddp::ReduceOp;
use candle_ddp::backend::{Collective, Communicator};

/// Values of many magnitudes from a linear congruential generator, so that the order of additions changes the bits.
fn random(seed: usize, count: usize) -> Vec<f32> {
    let mut state = seed as u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..count).map(|_| next() * 10_f32.powf(next() * 8.0)).collect()
}

/// f32 represents bf16 and f32 exactly.
const COUNT: usize = 40_000;

/// An element's result depends only on its values, not on the size of the message or on its chunk. Here it is the sum
/// in rank order on each host, rounded, and then the sum over hosts.
pub(crate) fn bits_do_not_depend_on_an_elements_position(engine: &Engine) {
    let world_size = 5;
    let mut hosts: Vec<Vec<usize>> = Vec::new();
    for rank in 0..world_size {
        match hosts.iter_mut().find(|ranks| (engine.host)(ranks[0]) == (engine.host)(rank)) {
            Some(ranks) => ranks.push(rank),
            None => hosts.push(vec![rank]),
        }
    }
    let rounded = |values: Vec<f32>, dtype: DType| {
        Tensor::from_vec(values, COUNT, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
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
        engine.on_ranks(world_size, |communicator| {
            let values = random(communicator.rank() + 1, COUNT);
            for count in [5, 1000, COUNT] {
                let tensor =
                    Tensor::from_slice(&values[..count], count, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
                communicator.run(Collective::AllReduce { tensor: tensor.clone(), op: ReduceOp::Sum }).unwrap();
                assert!(bits(&tensor) == expected[..count], "{}: {dtype:?}[{count}]", engine.name);
            }
        });
    }
}
