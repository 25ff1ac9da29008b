//! Sequences that are spread over ranks: the model of `examples/long_sequences` has one process's gradients.
#[path = "../../examples/long_sequences/model.rs"]
mod model;

use crate::common::ranks;
use candle_core::{DType, Device, Tensor};
use candle_ddp::checkpoint;
use candle_ddp::nn::cross_entropy;
use candle_ddp::optim::{Optimizer, ParamsSgd, Sgd};
use candle_ddp::seed::Generator;
use candle_ddp::{DdpOptions, DistributedDataParallel, Precision, Result, Sharding};
use candle_nn::VarMap;
use model::{LENGTH, Ranks, Transformer, VOCABULARY};
use std::collections::BTreeMap;

/// Sequences of a step, of all ranks together.
const BATCH: usize = 4;

type Weights = BTreeMap<String, Vec<f64>>;

fn tokens(seed: u64) -> Result<Tensor> {
    let mut generator = Generator::new(seed);
    let tokens = (0..BATCH * LENGTH).map(|_| generator.uniform(0., VOCABULARY as f64) as u32);
    Ok(Tensor::from_vec(tokens.collect(), (BATCH, LENGTH), &Device::Cpu)?)
}

/// The weights before and after a step along the gradients of the mean loss of all positions, with a learning rate of 1.
fn weights(world_size: usize, sequence_ranks: usize, sharding: Sharding) -> [Weights; 2] {
    let folder = tempfile::tempdir().unwrap();
    let all = ranks(world_size, |pg| {
        let mesh = pg.mesh(&[world_size / sequence_ranks, sequence_ranks], &["data", "sequence"])?;
        let ranks = Ranks::new(mesh.get_group("sequence")?)?;
        let options =
            DdpOptions { init_seed: Some(0), precision: Precision::Pure(DType::F64), sharding, ..Default::default() };
        let varmap = VarMap::new();
        let ddp = DistributedDataParallel::with_options(&pg, &varmap, |vb| Transformer::new(&ranks, vb), options)?;
        let mut optimizer = Sgd::new(&ddp, ParamsSgd { lr: 1., ..Default::default() })?;
        let whole = |name: &str| {
            let file = folder.path().join(name);
            checkpoint::save_distributed(&pg, &varmap, &file)?;
            let tensors = checkpoint::read(&file)?;
            let values = tensors.into_iter().map(|(name, tensor)| Ok((name, tensor.flatten_all()?.to_vec1()?)));
            values.collect::<Result<Weights>>()
        };
        let before = whole("before")?;
        let data = mesh.get_coordinate()[0];
        let count = BATCH * sequence_ranks / world_size;
        let own = |all: Tensor| ranks.part(&all.narrow(0, data * count, count)?, 1);
        let (x, y) = (own(tokens(1)?)?, own(tokens(2)?)?);
        let loss = cross_entropy(&ddp.forward(&x)?.flatten(0, 1)?, &y.flatten_all()?)?;
        optimizer.step(&ddp.backward(&loss)?)?;
        Ok([before, whole("after")?])
    });
    all.into_iter().next().unwrap()
}

fn assert_same_gradients(world_size: usize, sequence_ranks: usize, sharding: Sharding) {
    let [before, after] = weights(world_size, sequence_ranks, sharding);
    let [first, expected] = weights(1, 1, Sharding::Off);
    assert_eq!(before, first);
    for (name, expected) in &expected {
        let gradient = |after: &[f64]| -> Vec<f64> { first[name].iter().zip(after).map(|(a, b)| a - b).collect() };
        let (gradients, expected) = (gradient(&after[name]), gradient(expected));
        let largest = expected.iter().fold(0f64, |largest, value| largest.max(value.abs()));
        // That of keys' biases is zero.
        assert!(largest > 1e-6, "{name}: {largest}");
        for (gradient, expected) in gradients.iter().zip(&expected) {
            let difference = (gradient - expected).abs();
            assert!(difference < 1e-12 * largest.max(1e-3), "{name}, {world_size} ranks: {gradient}, not {expected}");
        }
    }
}

#[test]
fn the_gradients_of_sequences_that_are_spread_over_ranks_are_one_processs() {
    for ranks in [2, 3, 4] {
        assert_same_gradients(ranks, ranks, Sharding::Off);
    }
    // Two sequences at a time, each on two ranks; and two ranks with whole ones.
    assert_same_gradients(4, 2, Sharding::Off);
    assert_same_gradients(2, 1, Sharding::Off);
}

#[test]
fn the_layers_may_be_sharded_over_all_ranks_or_over_those_of_a_sequence() {
    for (world_size, sequence_ranks, ranks) in [(2, 2, None), (4, 2, None), (4, 2, Some(2))] {
        for reshard_after_forward in [true, false] {
            assert_same_gradients(world_size, sequence_ranks, Sharding::Blocks { reshard_after_forward, ranks });
        }
    }
    assert_same_gradients(4, 2, Sharding::Optimizer { ranks: None });
}
