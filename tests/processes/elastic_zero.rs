//! `elastic::run` with an optimizer whose state is sharded over the ranks, and random numbers of each rank; ranks are
//! killed.
use crate::common::{floats, tensor};
use crate::elastic_ranks::{BATCH, Net, Run, SAMPLES, event, result, run_as_rank, variables};
use candle_core::{DType, Device, IndexOp, Tensor};
use candle_ddp::checkpoint::{Parts, StateDict};
use candle_ddp::data::LoaderState;
use candle_ddp::elastic::State;
use candle_ddp::optim::{Optimizer, ParamsAdamW, ZeroRedundancyOptimizer};
use candle_ddp::seed::Generator;
use candle_ddp::{DistributedDataParallel, ProcessGroup, Result};
use candle_nn::VarMap;

const EPOCHS: u64 = 2;

struct Training {
    varmap: VarMap,
    /// Of each rank: each draws a different number of numbers in a step.
    noise: Generator,
    progress: LoaderState,
}

impl Parts for Training {
    fn parts(&mut self) -> Vec<(&str, &mut dyn StateDict)> {
        vec![("model", &mut self.varmap), ("noise", &mut self.noise), ("progress", &mut self.progress)]
    }
}

fn train(pg: &ProcessGroup, state: &mut State<Training>, own: usize) -> Result<Vec<f32>> {
    let ddp = DistributedDataParallel::new(pg, &state.varmap, |vb| Net::new(vb))?;
    let mut optimizer = ZeroRedundancyOptimizer::new(&ddp, ParamsAdamW { lr: 0.05, ..Default::default() })?;
    assert_eq!(state.restore("optimizer", &mut optimizer)?, state.commits() > 0);
    let data = tensor(&[SAMPLES, 4], 1);
    while state.progress.epoch < EPOCHS {
        let mine: Vec<usize> = state.progress.indices(pg.rank(), pg.world_size())?.take(BATCH).collect();
        let rows: Vec<Tensor> = mine.iter().map(|index| data.i(*index)).collect::<candle_core::Result<_>>()?;
        let noise = state.noise.randn(0., 0.1, (1 + pg.rank(), 4), DType::F32, pg.device())?.mean_keepdim(0)?;
        let loss = ddp.forward(&Tensor::stack(&rows, 0)?.broadcast_add(&noise)?)?.sqr()?.mean_all()?;
        event("forward", own, state.commits())?;
        let grads = ddp.backward(&loss)?;
        event("backward", own, state.commits())?;
        optimizer.step(&grads)?;
        // Other learning rates in each step: they have to come back as well.
        optimizer.set_learning_rate(optimizer.learning_rate() * 0.99)?;
        state.progress.advance(mine.len() * pg.world_size());
        event("step", own, state.commits())?;
        state.commit_including(("optimizer", &mut optimizer))?;
        event("commit", own, state.commits())?;
    }
    Ok(ddp.parameters().iter().flat_map(|var| floats(var)).collect())
}

/// The entry point of ranks.
#[test]
#[ignore = "started by other tests"]
fn rank_of_another_test() {
    let new = |own, device: &Device| {
        let noise = Generator::for_rank(13, own);
        let progress = LoaderState { seed: 11, dataset_len: SAMPLES, ..Default::default() };
        State::new(Training { varmap: variables(own, device), noise, progress })
    };
    run_as_rank(new, train);
}

fn launched(world_size: usize, options: &[&str], events: &str, min: Option<usize>) -> Run {
    Run::of("elastic_zero::rank_of_another_test", world_size, options, events, min)
}

#[test]
fn the_shards_of_a_killed_rank_come_from_its_mirror() {
    let calm = launched(3, &[], "", None);
    calm.succeeded();
    // At each place of a step, each rank.
    let events = "0 kill-forward 0,1 kill-forward 3,0 kill-backward 5,2 kill-step 7,1 kill-commit 9,0 kill-step 10,2 kill-commit 13";
    let run = launched(3, &["--max-restarts", "7"], events, None);
    run.succeeded();
    assert_eq!(result(run.folder.path(), &[0, 1, 2]), result(calm.folder.path(), &[0, 1, 2]));
    assert!(run.stderr().contains("(restart 7 of 7)"), "{}", run.stderr());
}

#[test]
fn the_ranks_that_are_left_share_the_shards() {
    let run = launched(4, &[], "2 kill-forward 2,0 kill-commit 4", Some(2));
    run.succeeded();
    result(run.folder.path(), &[1, 3]);
}

#[test]
fn what_a_rank_and_its_mirror_held_is_lost_when_they_die_together() {
    let run = launched(3, &["--max-restarts", "2"], "1 join-forward 4,2 join-forward 4", None);
    assert!(!run.output.status.success());
    for rank in 0..3 {
        let error = run.read(&format!("error-{rank}"));
        let expected = "the shard of rank 1 in commit 4 (of the states that are sharded over the ranks) is not";
        assert!(error.contains(expected), "{error}");
    }
}
