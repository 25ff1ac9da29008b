//! Ranks of `elastic::run` whose optimizer's state is sharded over them, and with random numbers of each rank; for tests that kill
//! them.
use crate::common::elastic_ranks::{
    BATCH, LENGTH, PAUSE, SAMPLES, append, event, folder, net, number, run_as_rank, variables, write_result,
};
use crate::common::{floats, of_zero, tensor};
use candle_core::{DType, Device, IndexOp, Module, Tensor};
use candle_ddp::checkpoint::{Checkpointer, CheckpointerOptions, Parts, StateDict};
use candle_ddp::data::LoaderState;
use candle_ddp::elastic::State;
use candle_ddp::optim::{Optimizer, ParamsAdamW, ZeroRedundancyOptimizer};
use candle_ddp::seed::Generator;
use candle_ddp::{
    DdpOptions, DistributedDataParallel, InitOptions, ProcessGroup, Result, Sharding, block, init_process_group,
};
use candle_nn::{VarBuilder, VarMap, func, linear};
use std::time::Duration;

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

/// Whether the model is sharded: its variables are made in the training loop (`loop`), or by mistake before it (`before`). With `hybrid`,
/// two ranks have a model together, and the others copies of it.
pub(crate) const SHARDED: &str = "CANDLE_DDP_TEST_SHARDED";

/// Whether the ranks know nothing of `elastic::run`: the launcher starts all of them again, and they continue from a checkpoint.
pub(crate) const RESTARTED: &str = "CANDLE_DDP_TEST_RESTARTED";

/// A sharded model and its variables are those of one group, and get their values from the last commit.
fn train_sharded(pg: &ProcessGroup, state: &mut State<Training>, own: usize, sharded: &str) -> Result<Vec<f32>> {
    let mut varmap = if sharded == "before" { state.varmap.clone() } else { VarMap::new() };
    // `net` in blocks.
    let build = |vb: VarBuilder<'static>| {
        let first = block(vb.pp("a"), |vb| linear(4, 8, vb))?;
        let last = block(vb.pp("b"), |vb| linear(8, 2, vb))?;
        candle_core::Result::Ok(func(move |x| last.forward(&first.forward(x)?.tanh()?)))
    };
    let shard_ranks = (sharded == "hybrid").then_some(2);
    let sharding = Sharding::Blocks { reshard_after_forward: true, ranks: shard_ranks };
    let options = DdpOptions { sharding, init_seed: Some(3), ..Default::default() };
    let ddp = DistributedDataParallel::with_options(pg, &varmap, build, options)?;
    steps(pg, state, own, &ddp, &mut varmap)?;
    // The pieces of all ranks.
    let mut vars: Vec<_> = varmap.data().lock().unwrap().clone().into_iter().collect();
    vars.sort_by(|(a, _), (b, _)| a.cmp(b));
    let pieces: Vec<Vec<f32>> = vars.iter().map(|(_, var)| floats(var)).collect();
    let all = pg.all_gather_object(&pieces)?;
    Ok((0..vars.len()).flat_map(|var| all.iter().flat_map(move |pieces| pieces[var].clone())).collect())
}

fn train(pg: &ProcessGroup, state: &mut State<Training>, own: usize) -> Result<Vec<f32>> {
    if let Ok(sharded) = std::env::var(SHARDED) {
        return train_sharded(pg, state, own, &sharded);
    }
    let ddp = DistributedDataParallel::with_options(pg, &state.varmap, |vb| net(vb), of_zero())?;
    // No further part.
    steps(pg, state, own, &ddp, &mut VarMap::new())?;
    Ok(ddp.parameters().iter().flat_map(|var| floats(var)).collect())
}

fn steps<M: Module>(
    pg: &ProcessGroup,
    state: &mut State<Training>,
    own: usize,
    ddp: &DistributedDataParallel<M>,
    weights: &mut VarMap,
) -> Result<()> {
    let mut optimizer = ZeroRedundancyOptimizer::new(ddp, ParamsAdamW { lr: 0.05, ..Default::default() })?;
    let (mut checkpointer, mut step) = (None, 0);
    if std::env::var(RESTARTED).is_ok() {
        let options = CheckpointerOptions { every: 3, resume: true, ..Default::default() };
        let made = checkpointer.insert(Checkpointer::new(pg, folder().join("run"), options)?);
        let last = made.load_latest((("optimizer", &mut optimizer), ("weights", &mut *weights), &mut **state))?;
        step = last.unwrap_or(0);
    } else {
        assert_eq!(state.restore("optimizer", &mut optimizer)?, state.commits() > 0);
        // Without sharding there are none.
        let has_weights = state.restore("weights", weights)?;
        assert_eq!(has_weights, state.commits() > 0 && ddp.sharding() != Sharding::Optimizer { ranks: None });
    }
    append(&format!("entered-{own}"), &std::process::id().to_string());
    let pause = Duration::from_millis(number(PAUSE, 0));
    let data = tensor(&[SAMPLES, 4], 1).to_device(pg.device())?;
    while state.progress.epoch < number(LENGTH, 2) {
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
        let parts = (("optimizer", &mut optimizer), ("weights", &mut *weights));
        match &mut checkpointer {
            Some(checkpointer) => {
                step += 1;
                checkpointer.save_if_due(step, (parts, &mut **state))?;
            }
            None => state.commit_including(parts)?,
        }
        event("commit", own, state.commits())?;
        std::thread::sleep(pause);
    }
    checkpointer.map_or(Ok(()), |mut checkpointer| checkpointer.finish())
}

/// Runs a rank, and reports its final parameters, or its error.
pub(crate) fn run() {
    let new = |own, device: &Device| {
        append(&format!("started-{own}"), &std::process::id().to_string());
        let noise = Generator::for_rank(13, own);
        let progress = LoaderState { seed: 11, dataset_len: SAMPLES, ..Default::default() };
        // A sharded model has no variables outside of a group.
        let varmap = if std::env::var(SHARDED).is_ok() { VarMap::new() } else { variables(own, device) };
        if std::env::var(RESTARTED).is_ok() {
            // A run that begins anew has no values from the first processes.
            let vars = varmap.data().lock().unwrap();
            vars.iter().for_each(|(name, var)| var.set(&tensor(var.dims(), name.len() as u64)).unwrap());
        }
        State::new(Training { varmap, noise, progress })
    };
    if std::env::var(RESTARTED).is_err() {
        return run_as_rank(new, train);
    }
    let own: usize = std::env::var("RANK").unwrap().parse().unwrap();
    let mut state = new(own, &Device::Cpu);
    let pg = init_process_group(InitOptions::default()).unwrap();
    match pg.abort_on_error(|| train(&pg, &mut state, own)) {
        Ok(weights) => write_result(own, &weights),
        Err(_) => std::process::exit(1),
    }
}
