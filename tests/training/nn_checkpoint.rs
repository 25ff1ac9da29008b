//! Activation checkpointing under DDP changes memory use and nothing else. Its other tests are in candle-ddp-nn.
use crate::common::{Between, assert_close, assert_error, floats, of_micro_batch, ranks, tensor, tiny, var};
use candle_core::{Module, ModuleT, Result, Tensor};
use candle_ddp::nn::{BatchNorm, Linear, batch_norm, checkpoint, linear, sync_batch_norm};
use candle_ddp::{DdpOptions, DistributedDataParallel, SpawnOptions, backward_with, spawn_with};
use candle_ddp_testing::checkpointed::{Kind, NAMES, Net, fill};
use candle_nn::{VarBuilder, VarMap};

#[test]
fn hooks_fire_once_under_ddp() {
    let trained = |kind: Kind| {
        ranks(2, move |pg| {
            let varmap = VarMap::new();
            let build = |vb: VarBuilder| Net::new(kind, &vb);
            let ddp = DistributedDataParallel::with_options(&pg, &varmap, build, tiny())?;
            fill(&varmap);
            let mut all = Vec::new();
            for step in 0..3 {
                let x = tensor(&[4, 6], 10 + 2 * step + pg.rank() as u64);
                let grads = ddp.backward(&ddp.forward(&x)?.sqr()?.sum_all()?)?;
                all.extend(NAMES.iter().flat_map(|name| floats(grads.get(&var(&varmap, name)).unwrap())));
            }
            Ok(all)
        })
    };
    let plain = trained(Kind::Plain);
    for kind in [Kind::Checkpoint, Kind::Nested] {
        for (checkpointed, plain) in trained(kind).iter().zip(&plain) {
            assert_close(checkpointed, plain, 1e-6, "averaged gradients");
        }
    }
}

/// The statistics of a batch norm after three steps, on every rank: in a checkpoint, or in one in another if `nests` says so.
fn statistics_of_norm(nests: Option<bool>, is_synchronised: bool) -> Vec<Vec<f32>> {
    ranks(2, |pg| {
        let build = |vb: VarBuilder| -> Result<BatchNorm> {
            if is_synchronised { sync_batch_norm(&pg, 6, 1e-5, vb) } else { batch_norm(6, 1e-5, vb) }
        };
        let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), build)?;
        for step in 0..3 {
            let x = tensor(&[4, 6], 10 * step + pg.rank() as u64);
            let in_checkpoints = |nests| {
                ddp.call(|norm| {
                    let norm = norm.clone();
                    let forward = move |x: &[Tensor]| norm.forward_t(&x[0], true);
                    // Which is then computed again twice.
                    let nested = move |x: &[Tensor]| checkpoint(&[&x[0]], forward.clone());
                    if nests { checkpoint(&[&x], nested) } else { nested(std::slice::from_ref(&x)) }
                })
            };
            let y = nests.map_or_else(|| ddp.forward_t(&x, true), in_checkpoints)?;
            ddp.backward(&y.sqr()?.mean_all()?)?;
        }
        Ok(ddp.named_buffers().iter().flat_map(|(_, var)| floats(var)).collect())
    })
}

/// One update for one batch, whether or not the backward pass computes it again. So it is with SyncBatchNorm.
#[test]
fn batch_norms_update_their_statistics_once() {
    for is_synchronised in [false, true] {
        let plain = statistics_of_norm(None, is_synchronised).remove(0);
        for nests in [true, false] {
            assert_eq!(statistics_of_norm(Some(nests), is_synchronised), [plain.clone(), plain.clone()]);
        }
    }
}

/// The running statistics, on every rank, of candle's batch norm that was trained in a checkpoint, whose backward pass changes them
/// a second time.
fn statistics(world_size: usize, virtual_ranks: Option<usize>) -> Vec<Vec<f32>> {
    type Normed = (Linear, candle_nn::BatchNorm);
    let options = SpawnOptions { world_size, virtual_ranks, ..Default::default() };
    let run = spawn_with(options, |pg| {
        let build = |vb: VarBuilder| -> Result<Normed> {
            Ok((linear(6, 4, vb.pp("linear"))?, candle_nn::batch_norm(4, 1e-5, vb.pp("norm"))?))
        };
        let options = DdpOptions { init_seed: Some(7), ..Default::default() };
        let ddp = DistributedDataParallel::with_options(&pg, &VarMap::new(), build, options)?;
        let forward = |seed: u64| {
            ddp.call(|(linear, norm): &Normed| {
                let (linear, norm) = (linear.clone(), norm.clone());
                checkpoint(&[&tensor(&[4, 6], seed)], move |x| norm.forward_t(&linear.forward(&x[0])?, true))
            })
        };
        for step in 0..3 {
            let loss = |number: usize| forward(10 * step + number as u64)?.sqr()?.mean_all();
            match ddp.micro_batches() {
                None => drop(ddp.backward(&loss(pg.rank())?)?),
                Some(numbers) => {
                    for number in numbers {
                        backward_with(&loss(number)?, &[&ddp], of_micro_batch(number))?;
                    }
                }
            }
        }
        Ok(ddp.named_buffers().iter().flat_map(|(_, var)| floats(var)).collect())
    });
    run.unwrap()
}

#[test]
fn statistics_that_the_backward_pass_changes_follow_rank_0() {
    let alone = statistics(1, None);
    assert_eq!(statistics(2, None), [&alone[0]; 2].map(Clone::clone));
    for world_size in [1, 2, 4] {
        for of_rank in statistics(world_size, Some(4)) {
            assert_eq!(of_rank, alone[0], "virtual ranks on {world_size} ranks");
        }
    }
}

#[test]
fn a_gradient_that_arrives_twice_is_an_error() {
    ranks(1, |pg| {
        let build = |vb: VarBuilder| linear(6, 6, vb);
        let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), build)?;
        let y = ddp.call(|layer| {
            let y = layer.forward(&tensor(&[4, 6], 1))?;
            // Hand-written activation checkpointing: a backward pass within another, which reaches a parameter a second time.
            let (again, x) = (layer.clone(), y.detach());
            let by_hand = Between(move || again.forward(&x)?.sum_all()?.backward().map(drop));
            layer.forward(&y.apply_op1(by_hand)?)
        })?;
        assert_error(ddp.backward(&y.sum_all()?), &["its gradient came twice in one backward pass"]);
        Ok(())
    });
}
