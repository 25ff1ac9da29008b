//! The program that trains with a pair of features.
use super::Feature::{self, *};
use crate::common::{going_on, of_micro_batch, waves};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_ddp::amp::{GradScaler, GradScalerOptions};
use candle_ddp::checkpoint::{self, Parts, StateDict};
use candle_ddp::comm_hook::AllReduce;
use candle_ddp::nn::{self, BatchNorm, Linear, LoraConfig, layer_norm, linear, sync_batch_norm};
use candle_ddp::optim::{
    self, AdamW, Ema, FusedOptimizer, Lamb, Optimizer, ParamsAdamW, ParamsLamb, ParamsMuon, ParamsSgd,
    PeriodicModelAverager, UpdateRule,
};
use candle_ddp::{
    Backward, Block, DdpOptions, DistributedDataParallel, DistributedModel, JoinOptions, Precision, ProcessGroup,
    ReduceOp, Result, Role, Sharding, WithGrad, backward_with, block,
};
use candle_nn::{Module, ModuleT, VarBuilder, VarMap};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// In two halves, of which each rank has an equal part.
const ROWS: usize = 24;
pub(super) const VIRTUAL: usize = 8;
const WIDTH: usize = 6;
pub(super) const STEPS: usize = 4;

struct Net {
    conv: Option<nn::Conv2d>,
    stem: Linear,
    layers: Vec<Block<nn::Func<'static>>>,
    norm: Option<BatchNorm>,
    head: Linear,
    checkpointed: bool,
}

impl Net {
    fn new(vb: VarBuilder<'static>, group: &ProcessGroup, with: &[Feature]) -> candle_core::Result<Self> {
        let layer = |vb: VarBuilder<'static>| -> candle_core::Result<_> {
            let (norm, fc) = (layer_norm(WIDTH, 1e-5, vb.pp("norm"))?, linear(WIDTH, WIDTH, vb.pp("fc"))?);
            Ok(nn::func(move |x| nn::add(x, &nn::gelu(&fc.forward(&norm.forward(x)?)?)?)))
        };
        let norm = match with.contains(&SyncBatchNorm) {
            true => Some(sync_batch_norm(group, WIDTH, 1e-5, vb.pp("sync"))?),
            false => None,
        };
        let conv = match with.contains(&ChannelsLast) {
            true => Some(nn::conv2d(3, 3, 2, Default::default(), vb.pp("conv"))?),
            false => None,
        };
        Ok(Self {
            conv,
            stem: linear(3, WIDTH, vb.pp("stem"))?,
            layers: (0..2).map(|index| block(vb.pp(format!("layers.{index}")), layer)).collect::<Result<_, _>>()?,
            norm,
            head: linear(WIDTH, 1, vb.pp("head"))?,
            checkpointed: with.contains(&Checkpoint),
        })
    }

    fn forward(&self, x: &Tensor, train: bool) -> candle_core::Result<Tensor> {
        let x = &match &self.conv {
            Some(conv) => {
                let pixels = [1.0, 0.5, -1.0, 0.25].map(|factor| x * factor);
                let pixels = pixels.into_iter().collect::<candle_core::Result<Vec<_>>>()?;
                let images = Tensor::stack(&pixels, 2)?.reshape((x.dim(0)?, 3, 2, 2))?;
                let images = nn::to_memory_format(&images, nn::MemoryFormat::ChannelsLast)?;
                conv.forward(&images)?.flatten_from(1)?
            }
            None => x.clone(),
        };
        let x = match self.checkpointed {
            true => {
                let stem = self.stem.clone();
                nn::checkpoint(&[x], move |x| stem.forward(&x[0]))?
            }
            false => self.stem.forward(x)?,
        };
        let x = self.layers.iter().try_fold(x, |x, layer| layer.forward(&x))?;
        let x = self.norm.as_ref().map_or(Ok(x.clone()), |norm| norm.forward_t(&x, train))?;
        self.head.forward(&x)
    }
}

fn rows(step: usize, ranges: &[Range<usize>]) -> candle_core::Result<Tensor> {
    let all = waves(&[ROWS, 3], step * 11);
    let parts =
        ranges.iter().map(|range| all.narrow(0, range.start, range.len())).collect::<candle_core::Result<Vec<_>>>()?;
    Tensor::cat(&parts, 0)
}

type Ddp = DistributedDataParallel<Net>;
pub(super) type Values = BTreeMap<String, Vec<f64>>;

/// A model that gets the outputs of the first, with its optimizer.
struct Second<'a> {
    ddp: &'a DistributedDataParallel<Linear>,
    varmap: VarMap,
    optimizer: AdamW,
    averager: PeriodicModelAverager,
}

struct SecondIfAny<'a>(Option<Second<'a>>);

impl Parts for SecondIfAny<'_> {
    fn parts(&mut self) -> Vec<(&str, &mut dyn StateDict)> {
        let Some(Second { varmap, optimizer, averager, .. }) = &mut self.0 else { return Vec::new() };
        vec![("second", varmap), ("second_optimizer", optimizer), ("second_averager", averager)]
    }
}

struct Program<'a, 'b> {
    pg: &'a ProcessGroup,
    with: &'a [Feature],
    ddp: &'a Ddp,
    second: Option<&'a mut Second<'b>>,
    scaler: GradScaler,
    collectives: Option<WithGrad>,
}

impl Program<'_, '_> {
    fn has(&self, feature: Feature) -> bool {
        self.with.contains(&feature)
    }

    /// The loss over rows of the batch, as a mean, or as a sum if the pass has a count.
    fn loss(&self, step: usize, ranges: &[Range<usize>], share: f64) -> Result<Tensor> {
        let mut y = self.ddp.call(|net| net.forward(&rows(step, ranges)?, true))?;
        if let Some(second) = &self.second {
            y = second.ddp.forward(&y)?;
        }
        if self.has(Evaluation) {
            let own = 0..self.pg.rank() + 1;
            nn::no_grad(|| self.ddp.call(|net| net.forward(&rows(step, &[own])?, false)))?;
        }
        let count = if self.has(Count) { y.elem_count() as f64 } else { 1.0 };
        let mut loss = ((&y - 1.0)?.sqr()?.mean_all()? * count)?;
        if let Some(collectives) = &self.collectives {
            // The mean of all ranks' outputs is the same on every rank.
            let mean = collectives.all_reduce(&y.mean_all()?, ReduceOp::Avg)?;
            loss = (loss + (mean.sqr()? * count)?)?;
        }
        self.scaler.scale(&(loss * share)?)
    }

    fn count(&self, ranges: &[Range<usize>]) -> Option<f64> {
        self.has(Count).then(|| ranges.iter().map(Range::len).sum::<usize>() as f64)
    }

    fn models(&self) -> Vec<&DistributedModel> {
        let first: &DistributedModel = self.ddp;
        std::iter::once(first).chain(self.second.iter().map(|second| -> &DistributedModel { second.ddp })).collect()
    }

    /// The gradients of a step; None if it has been made.
    fn backward(&self, optimizer: &mut impl Optimizer, step: usize) -> Result<Option<GradStore>> {
        let (rank, ranks) = (self.pg.rank(), self.pg.world_size());
        // With a count, ranks may have different numbers of rows, unless a collective takes the mean of their means.
        let start = |rank: usize| match self.has(Count) && !self.has(WithGrad) {
            true => ROWS / 2 * rank * (rank + 1) / (ranks * (ranks + 1)),
            false => ROWS / 2 * rank / ranks,
        };
        let (start, end) = (start(rank), start(rank + 1));
        let mut own = vec![start..end, ROWS / 2 + start..ROWS / 2 + end];
        let pass = |ranges: &[Range<usize>], step, share, into: Option<&mut GradStore>| {
            let options = Backward { count: self.count(ranges), into, ..Default::default() };
            backward_with(&self.loss(step, ranges, share)?, &self.models(), options)
        };
        if self.has(VirtualRanks) && !self.has(Into) && !self.has(BackwardAndStep) {
            let mut last = None;
            for number in self.ddp.micro_batches().unwrap() {
                let rows = number * ROWS / VIRTUAL..(number + 1) * ROWS / VIRTUAL;
                let range = std::slice::from_ref(&rows);
                let _guard = self.has(NoSync).then(|| self.ddp.no_sync());
                let options = Backward { count: self.count(range), ..of_micro_batch(number) };
                last = Some(backward_with(&self.loss(step, range, 1.0)?, &self.models(), options)?);
            }
            return Ok(last);
        }
        let (all, mut share) = (own.clone(), 1.0);
        if self.has(NoSync) {
            // The half of a mean; sums need no division.
            share = if self.has(Count) { 1.0 } else { 0.5 };
            let _guards = (self.ddp.no_sync(), self.second.as_ref().map(|second| second.ddp.no_sync()));
            pass(&[own.remove(0)], step, share, None)?;
            if self.has(BackwardAndStep) {
                let loss = self.loss(step, &own, share)?;
                return self.ddp.backward_and_step(&loss, optimizer).map(|_| None);
            }
        }
        if self.has(BackwardAndStep) {
            let loss = self.loss(step, &own, share)?;
            return self.ddp.backward_and_step(&loss, optimizer).map(|_| None);
        }
        if self.has(Into) {
            let mut grads = GradStore::default();
            pass(&own, step, share, Some(&mut grads))?;
            return pass(&all, step + 100, 0.5, Some(&mut grads)).map(Some);
        }
        pass(&own, step, share, None).map(Some)
    }

    fn step(&mut self, optimizer: &mut impl Optimizer, step: usize) -> Result<()> {
        let Some(mut grads) = self.backward(optimizer, step)? else { return Ok(()) };
        if self.has(Clipping) {
            optimizer.unscale(&mut self.scaler, &mut grads)?;
            let norm = optimizer.clip_grad_norm(&mut grads, 0.01)?.to_scalar::<f64>()?;
            assert!(norm > 0.01, "{norm}");
        }
        assert!(match &mut self.second {
            None => {
                self.scaler.step(optimizer, &mut grads)?;
                true
            }
            Some(second) => self.scaler.step_if_finite(&mut grads, |grads| {
                optimizer.step(grads)?;
                second.optimizer.step(grads)
            })?,
        });
        self.scaler.update()
    }
}

/// The frozen weights of a model with adapters.
fn base() -> HashMap<String, Tensor> {
    let value = |seed: usize, index: usize| ((seed * 31 + index * 7) as f64 * 0.3).sin() * 0.5 + 0.6;
    let shapes: [(&str, &[usize]); 18] = [
        ("conv.weight", &[3, 3, 2, 2]),
        ("conv.bias", &[3]),
        ("sync.weight", &[WIDTH]),
        ("sync.bias", &[WIDTH]),
        ("sync.running_mean", &[WIDTH]),
        ("sync.running_var", &[WIDTH]),
        ("stem.weight", &[WIDTH, 3]),
        ("stem.bias", &[WIDTH]),
        ("layers.0.norm.weight", &[WIDTH]),
        ("layers.0.norm.bias", &[WIDTH]),
        ("layers.0.fc.weight", &[WIDTH, WIDTH]),
        ("layers.0.fc.bias", &[WIDTH]),
        ("layers.1.norm.weight", &[WIDTH]),
        ("layers.1.norm.bias", &[WIDTH]),
        ("layers.1.fc.weight", &[WIDTH, WIDTH]),
        ("layers.1.fc.bias", &[WIDTH]),
        ("head.weight", &[1, WIDTH]),
        ("head.bias", &[1]),
    ];
    let tensor = |(seed, (name, shape)): (usize, &(&str, &[usize]))| {
        let values = (0..shape.iter().product()).map(|index| value(seed, index)).collect();
        (name.to_string(), Tensor::from_vec(values, *shape, &Device::Cpu).unwrap())
    };
    shapes.iter().enumerate().map(tensor).collect()
}

fn options(pg: &ProcessGroup, with: &[Feature]) -> DdpOptions {
    let has = |feature| with.contains(&feature);
    let is_hybrid = (has(HybridOptimizer) || has(HybridBlocks)) && pg.world_size().is_multiple_of(2);
    let ranks = is_hybrid.then_some(pg.world_size() / 2);
    let sharding = match () {
        _ if has(ShardedOptimizer) || has(HybridOptimizer) => Sharding::Optimizer { ranks },
        _ if has(ShardedBlocks) || has(HybridBlocks) => {
            Sharding::Blocks { reshard_after_forward: has(ShardedBlocks), ranks }
        }
        _ => Sharding::Off,
    };
    let is_frozen = has(Frozen);
    DdpOptions {
        precision: Precision::Pure(DType::F64),
        sharding,
        on_non_finite: has(OnNonFinite).then_some(candle_ddp::OnNonFinite::Skip { at_most: 3 }),
        replica_check: has(ReplicaCheck).then_some(candle_ddp::ReplicaCheck { every: 1, warn_only: false }),
        role: Arc::new(
            move |name| if is_frozen && name.ends_with("norm.bias") { Role::Frozen } else { Role::Parameter },
        ),
        init_seed: Some(7),
        ..Default::default()
    }
}

/// Trains these steps, after those that an earlier run has saved in the folder, and returns the whole weights and averages after the last.
fn train<R: UpdateRule>(
    pg: &ProcessGroup,
    with: &[Feature],
    optimizer: impl FnOnce(&Ddp) -> Result<FusedOptimizer<R>>,
    steps: Range<usize>,
    folder: &Path,
) -> Result<Values> {
    let has = |feature| with.contains(&feature);
    let mut varmap = VarMap::new();
    let lora = LoraConfig {
        r: 2,
        target_modules: vec!["fc".to_string()],
        modules_to_save: ["head", "sync"][..1 + usize::from(has(SyncBatchNorm))]
            .iter()
            .map(|name| name.to_string())
            .collect(),
        ..Default::default()
    };
    if has(Adapters) {
        for (name, value) in base().into_iter().filter(|(name, _)| lora.is_trained(name)) {
            varmap.data().lock().unwrap().insert(name, Var::from_tensor(&value)?);
        }
    }
    let build = |vb: VarBuilder<'static>| match has(Adapters) {
        false => Net::new(vb, pg, with),
        true => {
            let base = VarBuilder::from_tensors(base(), DType::F64, &Device::Cpu);
            lora.build(base, vb, |vb| Net::new(vb, pg, with))
        }
    };
    let ddp = DistributedDataParallel::with_options(pg, &varmap, build, options(pg, with))?;
    let second_varmap = VarMap::new();
    let second = match has(TwoModels) {
        true => {
            let build = |vb: VarBuilder<'static>| linear(1, 1, vb.pp("second"));
            Some(DistributedDataParallel::with_options(pg, &second_varmap, build, options(pg, with))?)
        }
        false => None,
    };
    // A sharded model has no other model to be averaged with.
    let alone = has(Averager) && (has(ShardedBlocks) || has(HybridBlocks));
    let of = |rank: usize| if alone { pg.new_group(&[rank]) } else { Ok(None) };
    let own: Vec<_> = (0..pg.world_size()).map(of).collect::<Result<_>>()?;
    let own = own.into_iter().flatten().next();
    let outer = ParamsSgd { lr: 0.7, momentum: 0.9, nesterov: true, ..Default::default() };
    let averager = || match has(Outer) {
        false => PeriodicModelAverager::new(own.as_ref().unwrap_or(pg), 1, 0, None),
        true => PeriodicModelAverager::new(pg, 2, 0, outer.clone()),
    };
    let second = second.as_ref().map(|ddp| {
        let (varmap, adamw) = (second_varmap.clone(), ParamsAdamW { lr: 0.01, ..Default::default() });
        Ok::<_, candle_ddp::Error>(Second { ddp, varmap, optimizer: AdamW::new(ddp, adamw)?, averager: averager()? })
    });
    let mut second = SecondIfAny(second.transpose()?);
    if has(CommHook) {
        ddp.register_comm_hook(AllReduce::default())?;
    }
    let mut optimizer = optimizer(&ddp)?;
    let enabled = has(GradScaler);
    let scaling = GradScalerOptions { enabled, init_scale: 1024.0, growth_interval: 2, ..Default::default() };
    let all = second.0.iter().flat_map(|second| second.ddp.parameters()).chain(ddp.parameters()).collect::<Vec<_>>();
    let scaler = candle_ddp::amp::GradScaler::new(pg, all, scaling)?;
    let mut ema = Ema::new(&ddp, 0.7)?;
    let mut averager = averager()?;
    let collectives = if has(WithGrad) { Some(pg.with_grad()?) } else { None };
    let mut checkpointer = going_on(pg, folder.join("run"))?;
    let last = checkpointer.load_latest((
        ("model", &mut varmap),
        ("optimizer", &mut optimizer),
        (("ema", &mut ema), ("averager", &mut averager)),
        &mut second,
    ))?;
    assert_eq!(last, steps.start.checked_sub(1).map(|step| step as u64));
    let mut program = Program { pg, with, ddp: &ddp, second: second.0.as_mut(), scaler, collectives };
    let mut all = |optimizer: &mut FusedOptimizer<R>| -> Result<()> {
        for step in steps.clone() {
            program.step(optimizer, step)?;
            if has(Averager) || has(Outer) {
                averager.average_parameters(&ddp)?;
                if let Some(second) = &mut program.second {
                    second.averager.average_parameters(second.ddp)?;
                }
            }
            ema.update()?;
        }
        Ok(())
    };
    if has(Join) {
        optimizer.join(&ddp, JoinOptions::default(), all)?;
    } else {
        all(&mut optimizer)?
    };
    let averages = (("ema", &mut ema), ("averager", &mut averager));
    let parts = (("model", &mut varmap), ("optimizer", &mut optimizer), averages, &mut second);
    checkpointer.save(steps.end as u64 - 1, parts)?.wait()?;
    if steps.end < STEPS {
        return Ok(Values::new());
    }
    let whole = |name: &str, varmap: &VarMap| -> Result<Values> {
        let path = folder.join(name);
        checkpoint::save_distributed(pg, varmap, &path)?;
        let values =
            |(name, tensor): (String, Tensor)| Ok((name, tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?));
        checkpoint::read(&path)?.into_iter().map(values).collect()
    };
    let mut found = whole("model", &varmap)?;
    if has(TwoModels) {
        found.extend(whole("second", &second_varmap)?);
    }
    ema.apply()?;
    found.extend(whole("averages", &varmap)?.into_iter().map(|(name, values)| (format!("average of {name}"), values)));
    Ok(found)
}

/// Runs the program on a rank.
pub(super) fn run(pg: &ProcessGroup, with: &[Feature], steps: Range<usize>, folder: &Path) -> Result<Values> {
    let (adamw, muon) = (ParamsAdamW { lr: 0.01, ..Default::default() }, ParamsMuon { lr: 0.01, ..Default::default() });
    let lamb = ParamsLamb { lr: 0.01, ..Default::default() };
    let by_adamw = |name: &str| name.starts_with("head");
    match (with.contains(&Norms), with.contains(&Muon)) {
        (true, _) => train(pg, with, |ddp| Lamb::new(ddp, lamb), steps, folder),
        (_, true) => train(pg, with, |ddp| optim::Muon::with_adamw(ddp, muon, adamw, by_adamw), steps, folder),
        (_, false) => train(pg, with, |ddp| AdamW::new(ddp, adamw), steps, folder),
    }
}
