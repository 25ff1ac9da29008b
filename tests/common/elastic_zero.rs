//! Ranks of `elastic::run` whose optimizer's state is sharded over them, and with random numbers of each rank; for tests that kill
//! them.
use crate::common::{floats, tensor};
use crate::elastic_ranks::{BATCH, Net, SAMPLES, event, run_as_rank, variables};
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
    let data = tensor(&[SAMPLES, 4], 1).to_device(pg.device())?;
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

/// Runs a rank, and reports its final parameters, or its error.
pub(crate) fn run() {
    let new = |own, device: &Device| {
        let noise = Generator::for_rank(13, own);
        let progress = LoaderState { seed: 11, dataset_len: SAMPLES, ..Default::default() };
        State::new(Training { varmap: variables(own, device), noise, progress })
    };
    run_as_rank(new, train);
}
