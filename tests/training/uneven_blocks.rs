//! Ranks that run sharded blocks a different number of times wait for each other in two groups: all get an error soon, far from the time-out.
use crate::common::counted;
use candle_core::{DType, Tensor};
use candle_ddp::nn::{Linear, linear, no_grad};
use candle_ddp::optim::{Optimizer, ParamsAdamW, ZeroRedundancyOptimizer};
use candle_ddp::{
    Block, DdpOptions, DistributedDataParallel, Error, Failure, ProcessGroup, ReduceOp, Result, Sharding, SpawnOptions,
    Unused, backward_with, block, spawn_with,
};
use candle_nn::{VarBuilder, VarMap};
use std::time::{Duration, Instant};

const SOON: Duration = Duration::from_secs(120);

type Ddp = DistributedDataParallel<[Block<Linear>; 2]>;

/// Returns the error that all ranks get from `work`, with a model of two sharded blocks.
#[track_caller]
fn failure(world_size: usize, sharding: Sharding, work: impl Fn(&ProcessGroup, &Ddp) -> Result<()> + Sync) -> String {
    let begin = Instant::now();
    let all = spawn_with(SpawnOptions { world_size, ..Default::default() }, |pg| {
        let one = |vb: VarBuilder<'static>| block(vb, |vb| linear(4, 4, vb));
        let build = |vb: VarBuilder<'static>| Ok::<_, candle_core::Error>([one(vb.pp("text"))?, one(vb.pp("vision"))?]);
        let options = DdpOptions { sharding, unused: Unused::Allow, ..Default::default() };
        let ddp = DistributedDataParallel::with_options(&pg, &VarMap::new(), build, options)?;
        let error = work(&pg, &ddp).unwrap_err();
        assert!(matches!(error, Error::Group(Failure::Desync { sequence: 0, .. })), "{error:?}");
        Ok(error.to_string())
    });
    assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
    let all = all.unwrap();
    assert!(all.iter().all(|text| *text == all[0]), "{all:?}");
    all[0].clone()
}

#[track_caller]
fn assert_contains(text: &str, parts: &[&str]) {
    parts.iter().for_each(|part| assert!(text.contains(part), "{part:?} is not in {text}"));
}

fn x(pg: &ProcessGroup) -> Result<Tensor> {
    Ok(Tensor::ones((2, 4), DType::F32, pg.device())?)
}

const HINT: &str = "Sharded blocks, SyncBatchNorm and collectives with a gradient call in a companion of their group: all ranks must run them \
                    equally often and in the same order, also in an evaluation and in a step without samples";

#[test]
fn an_evaluation_with_a_batch_more_on_one_rank_ends_soon() {
    let text = failure(2, Sharding::Blocks { reshard_after_forward: true, ranks: None }, |pg, ddp| {
        for _ in 0..3 - pg.rank() {
            no_grad(|| ddp.call(|[text, vision]| vision.forward(&text.forward(&x(pg)?)?).map_err(Error::from)))?;
        }
        pg.all_reduce_scalars([1.], ReduceOp::Sum).map(drop)
    });
    let parts = [
        "rank 0 waits in all_gather(f32[10]) for the parameters of block text in the companion of the group of all ranks, rank 1 in all_reduce(",
        "for all_reduce_scalars in the group of all ranks: they wait for each other",
        HINT,
        "The call of rank 0 is at tests/training/uneven_blocks.rs:",
        ", that of rank 1 is at tests/training/uneven_blocks.rs:",
    ];
    assert_contains(&text, &parts);
}

#[test]
fn a_block_that_one_rank_leaves_out_ends_soon() {
    let sharding = Sharding::Blocks { reshard_after_forward: false, ranks: None };
    let text = failure(2, sharding, |pg, ddp| {
        let mut optimizer = ZeroRedundancyOptimizer::new(ddp, ParamsAdamW::default())?;
        loop {
            let y = ddp.call(|[text, vision]| {
                let y = text.forward(&x(pg)?)?;
                if pg.rank() == 1 { Ok(y) } else { vision.forward(&y).map_err(Error::from) }
            })?;
            optimizer.step(&ddp.backward(&y.sqr()?.mean_all()?)?)?;
        }
    });
    assert_contains(
        &text,
        &[
            "rank 0 waits in reduce_scatter(f32[10]) for the gradients of vision.weight, vision.bias (bucket 0) in the group of all ranks, rank 1 in all_gather(f32[10]) for the parameters of block vision in the companion of the group of all ranks: they wait for each other",
            HINT,
            "The call of rank 0 is at tests/training/uneven_blocks.rs:",
            ", that of rank 1 is at tests/training/uneven_blocks.rs:",
        ],
    );
}

#[test]
fn a_pass_that_one_rank_makes_alone_in_hybrid_sharding_ends_soon() {
    let sharding = Sharding::Blocks { reshard_after_forward: true, ranks: Some(2) };
    let text = failure(4, sharding, |pg, ddp| {
        let passes = if pg.rank() == 3 { 2 } else { 1 };
        for _ in 0..passes {
            ddp.call(|[text, vision]| vision.forward(&text.forward(&x(pg)?)?).map_err(Error::from))?;
        }
        pg.barrier()
    });
    assert_contains(
        &text,
        &[
            "rank 2 waits in barrier() in the group of all ranks, rank 3 in all_gather(",
            "for the parameters of block text in",
        ],
    );
}

/// A rank without samples, with any loss of 0.
fn step(pg: &ProcessGroup, is_constant: bool, sharding: Sharding) -> Result<Vec<f32>> {
    let build = |vb: VarBuilder<'static>| block(vb.pp("a"), |vb| linear(4, 4, vb));
    let options = DdpOptions { sharding, init_seed: Some(3), ..Default::default() };
    let ddp = DistributedDataParallel::with_options(pg, &VarMap::new(), build, options)?;
    let mut optimizer = ZeroRedundancyOptimizer::new(&ddp, ParamsAdamW::default())?;
    let mut losses = Vec::new();
    for turn in 0..3 {
        let is_empty = turn == 1 && pg.rank() == 1;
        let sum = |x: &Tensor| Ok::<_, Error>(ddp.call(|a| a.forward(x))?.sqr()?.sum_all()?);
        let (loss, count) = match is_empty {
            true if is_constant => (Tensor::zeros((), DType::F32, pg.device())?, 0.),
            true => {
                let loss = sum(&x(pg)?.zeros_like()?)?;
                (loss.mul(&loss.zeros_like()?)?, 0.)
            }
            false => (sum(&x(pg)?)?, 2.),
        };
        let backward = counted(count);
        optimizer.step(&backward_with(&loss, &[&ddp], backward)?)?;
        let [all] = pg.all_reduce_scalars([loss.to_scalar::<f32>()?.into()], ReduceOp::Sum)?;
        losses.push(all as f32);
    }
    Ok(losses)
}

#[test]
fn a_rank_without_samples_runs_the_model_on_zeros() {
    let run = |is_constant, sharding| {
        let all = spawn_with(SpawnOptions { world_size: 2, ..Default::default() }, |pg| {
            Ok(step(&pg, is_constant, sharding).map_err(|error| error.to_string()))
        });
        all.unwrap()
    };
    let plain = run(true, Sharding::Optimizer { ranks: None });
    assert!(plain[0].is_ok(), "{plain:?}");
    assert_eq!(run(false, Sharding::Blocks { reshard_after_forward: true, ranks: None }), plain);
    let kept = Sharding::Blocks { reshard_after_forward: false, ranks: None };
    assert_eq!(run(true, kept), plain);
    // At once, on both ranks.
    let begin = Instant::now();
    let refused = run(true, Sharding::Blocks { reshard_after_forward: true, ranks: None });
    assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
    for error in refused.into_iter().map(Result::unwrap_err) {
        let text = "the loss of a rank without samples must depend on the model with the parameter a.weight, since its sharded blocks";
        assert_contains(&error, &[text, "multiply the loss by a tensor of 0"]);
    }
}
