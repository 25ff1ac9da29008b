//! Ranks of `elastic::run` that communicate in more groups than the one that they are given, and whose commits include parts that
//! belong to a group; for tests that kill them.
#![allow(dead_code, clippy::unwrap_used)] // each test file uses only some helpers, and a failed test may panic
use crate::common::elastic_ranks::{
    LENGTH, PAUSE, SAMPLES, all_lost, append, event, first_time, folder, number, run_as_rank,
};
use crate::common::{Between, floats, tensor, tiny};
use candle_core::{DType, Device, Module, ModuleT, Tensor};
use candle_ddp::amp::{GradScaler, GradScalerOptions};
use candle_ddp::checkpoint::{Parts, StateDict};
use candle_ddp::data::{DataLoader, LoaderOptions, TensorDataset};
use candle_ddp::elastic::State;
use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW, ParamsStepLr, StepLr};
use candle_ddp::seed::Generator;
use candle_ddp::{DdpOptions, DistributedDataParallel, P2pOp, ProcessGroup, ReduceOp, Result, nn};
use candle_nn::{Linear, VarBuilder, VarMap, linear};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How ranks communicate apart from DDP: a list of `norm`, `subgroups`, `messages`. With `parts`, steps are made in parts.
pub(crate) const SHAPE: &str = "CANDLE_DDP_TEST_SHAPE";
/// Rank 0 writes a checkpoint after this many commits.
pub(crate) const EVERY: u64 = 3;
const BATCH: usize = 2;
const WIDTH: usize = 8;

fn has(shape: &str) -> bool {
    std::env::var(SHAPE).is_ok_and(|shapes| shapes.split(',').any(|other| other == shape))
}

/// A network whose statistics may span all ranks, and in whose backward pass a rank may die.
struct Net {
    input: Linear,
    norm: Option<nn::BatchNorm>,
    output: Linear,
    own: usize,
    commit: AtomicU64,
}

impl Net {
    fn new(vb: VarBuilder, group: Option<&ProcessGroup>, own: usize) -> candle_core::Result<Self> {
        let norm = match (has("norm"), group) {
            (false, _) => None,
            (true, Some(group)) => Some(nn::sync_batch_norm(group, WIDTH, 1e-5, vb.pp("norm"))?),
            (true, None) => Some(nn::batch_norm(WIDTH, 1e-5, vb.pp("norm"))?),
        };
        let (input, output) = (linear(4, WIDTH, vb.pp("input"))?, linear(WIDTH, 2, vb.pp("output"))?);
        Ok(Self { input, norm, output, own, commit: AtomicU64::new(0) })
    }
}

impl Module for Net {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let mut x = self.input.forward(x)?;
        if let Some(norm) = &self.norm {
            x = norm.forward_t(&x, true)?;
        }
        let (own, commit) = (self.own, self.commit.load(Ordering::Relaxed));
        let x = x.tanh()?.apply_op1(Between(move || Ok(event("inside", own, commit)?)))?;
        self.output.forward(&x)
    }
}

struct Training {
    varmap: VarMap,
    optimizer: AdamW,
}

impl Parts for Training {
    fn parts(&mut self) -> Vec<(&str, &mut dyn StateDict)> {
        vec![("model", &mut self.varmap), ("optimizer", &mut self.optimizer)]
    }
}

impl Training {
    fn new(own: usize) -> Self {
        let varmap = VarMap::new();
        Net::new(VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu), None, own).unwrap();
        let is_first = own == 0 && first_time("first", 0, 0);
        let vars = varmap.data().lock().unwrap();
        let mut named: Vec<_> = vars.iter().map(|(name, var)| (name.clone(), var.clone())).collect();
        drop(vars);
        named.retain(|(name, _)| !name.contains("running_"));
        named.sort_by(|(name, _), (other, _)| name.cmp(other));
        // Other initial values in every process but the first of rank 0: all have to get its state.
        let weights = named.iter().filter(|(name, _)| !name.starts_with("norm"));
        // When all are lost before the first checkpoint, the run starts from scratch.
        let seed = if is_first || all_lost("load") { 3 } else { u64::from(std::process::id()) };
        weights
            .for_each(|(name, var)| var.set(&(tensor(var.dims(), seed + name.len() as u64) * 0.3).unwrap()).unwrap());
        let optimizer = AdamW::new(named, ParamsAdamW { lr: 0.05, ..Default::default() }).unwrap();
        Self { varmap, optimizer }
    }
}

/// The groups of all ranks but the last, and of all but the first, as far as this rank is a member.
fn subgroups(pg: &ProcessGroup) -> Result<Vec<ProcessGroup>> {
    let last = pg.world_size() - 1;
    if !has("subgroups") || last == 0 {
        return Ok(Vec::new());
    }
    let all: Vec<usize> = (0..=last).collect();
    let made = [&all[..last], &all[1..]].map(|ranks| pg.new_group(ranks));
    Ok(made.into_iter().collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
}

/// Exchanges this rank's numbers with the others. The result depends on every group in which it communicates.
fn exchange(pg: &ProcessGroup, groups: &[ProcessGroup], own: usize, commit: u64, x: &Tensor) -> Result<Tensor> {
    let mut sum = x.copy()?;
    for group in groups {
        let part = (&sum / group.world_size() as f64)?;
        let work = group.all_reduce_async(&part, ReduceOp::Sum)?;
        event("group", own, commit)?;
        work.wait()?;
        sum = part;
    }
    if has("messages") && pg.world_size() > 1 {
        let (rank, world_size) = (pg.rank(), pg.world_size());
        let (next, before) = ((rank + 1) % world_size, (rank + world_size - 1) % world_size);
        let received = sum.zeros_like()?;
        event("message", own, commit)?;
        let send = P2pOp::Send { tensor: sum.clone(), peer: next };
        pg.batch_isend_irecv(&[send, P2pOp::Recv { tensor: received.clone(), peer: before }])?.wait()?;
        // One message after the other, too: the first rank begins.
        if rank == 0 {
            pg.send(&sum, next)?;
            pg.recv(&sum, before)?;
        } else {
            let own = sum.copy()?;
            pg.recv(&sum, before)?;
            pg.send(&own, next)?;
        }
        sum = ((sum + received)? * 0.5)?;
    }
    Ok(sum)
}

fn train(pg: &ProcessGroup, state: &mut State<Training>, own: usize) -> Result<Vec<f32>> {
    event("begin", own, state.commits())?;
    append(&format!("entered-{own}"), &std::process::id().to_string());
    let options = match has("parts") {
        true => DdpOptions { replica_check: None, ..tiny() },
        false => DdpOptions::default(),
    };
    let ddp = DistributedDataParallel::with_options(pg, &state.varmap, |vb| Net::new(vb, Some(pg), own), options)?;
    let groups = subgroups(pg)?;
    event("made", own, state.commits())?;
    // Objects that belong to the group, or are made in it.
    let options = LoaderOptions { batch_size: BATCH, ..Default::default() };
    let mut loader = DataLoader::new(TensorDataset::new(tensor(&[SAMPLES, 4], 1))?, pg, options)?;
    let options = GradScalerOptions { init_scale: 4., growth_interval: 5, ..Default::default() };
    let mut scaler = GradScaler::new(pg, &ddp, options)?;
    let mut schedule = StepLr::new(&mut state.optimizer, ParamsStepLr { step_size: 5, gamma: 0.9 })?;
    let mut noise = Generator::new(7);
    let parts: [(&str, &mut dyn StateDict); 4] =
        [("loader", &mut loader), ("scaler", &mut scaler), ("schedule", &mut schedule), ("noise", &mut noise)];
    for (name, part) in parts {
        let restored = state.restore(name, part)?;
        assert_eq!(restored, state.commits() > 0, "{name} as of commit {}", state.commits());
    }
    append(&format!("restored-{own}"), &format!("{} {:?}", state.commits(), loader.state()));
    let pause = Duration::from_millis(number(PAUSE, 0));
    while loader.current_epoch() < number(LENGTH, 3) {
        for batch in loader.iter() {
            let commit = state.commits();
            let batch = exchange(pg, &groups, own, commit, &batch?)?;
            let noise_of_step = noise.randn(0., 0.01, (1, 4), DType::F32, pg.device())?;
            let batch = batch.broadcast_add(&noise_of_step)?;
            let output = ddp.call(|net| {
                net.commit.store(commit, Ordering::Relaxed);
                net.forward(&batch)
            });
            let loss = output?.sqr()?.mean_all()?;
            event("forward", own, commit)?;
            if has("parts") {
                ddp.backward_and_step(&loss, &mut state.optimizer)?;
            } else {
                let mut grads = ddp.backward(&scaler.scale(&loss)?)?;
                event("backward", own, commit)?;
                scaler.step(&mut state.optimizer, &mut grads)?;
                scaler.update()?;
            }
            schedule.step(&mut state.optimizer)?;
            event("step", own, commit)?;
            let (loader, scaler) = (("loader", &mut loader), ("scaler", &mut scaler));
            state.commit_including((loader, scaler, ("schedule", &mut schedule), ("noise", &mut noise)))?;
            if pg.rank() == 0 && all_lost("load") && state.commits().is_multiple_of(EVERY) {
                state.save(folder().join("checkpoint"))?;
            }
            event("commit", own, state.commits())?;
            std::thread::sleep(pause);
        }
    }
    event("end", own, 0)?;
    let state = [loader.state().epoch as f32, scaler.current_scale() as f32, state.optimizer.learning_rate() as f32];
    Ok(ddp.parameters().iter().flat_map(|var| floats(var)).chain(state).collect())
}

/// Runs a rank, and reports its final parameters, or its error.
pub(crate) fn run() {
    let start = |own| {
        append(&format!("started-{own}"), &std::process::id().to_string());
        State::new(Training::new(own))
    };
    run_as_rank(|own, _| start(own), train);
}
