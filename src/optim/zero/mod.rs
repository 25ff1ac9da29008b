//! ZeRO-2: optimizer state and gradients sharded over the ranks.
mod checkpoint;
mod join;
mod layout;
mod owners;
mod shards;
mod whole;

use super::clip::{self, NormType};
use super::fused::number;
use super::kernel::{Fused, Moment, Sums};
use super::optimizer::{Optimizer, check_learning_rates};
use super::parameters::ParameterGroup;
use super::rule::{UpdateRule, limit, max_grad_norm};
use super::update::{self, Part};
use crate::amp::GradScaler;
use crate::backend::{Work, label};
use crate::ddp::non_finite::is_skipped;
use crate::ddp::steps::Steps;
use crate::ddp::{BucketMemory, DistributedDataParallel, PendingGradients, Reducer, Shard, own_gradient, scaled};
use crate::goes_with::Feature;
use crate::process_group::{Operation, ProcessGroup};
use crate::state::StateDict;
use crate::tensor::copy;
use crate::{Error, ReduceOp, Result};
use candle_core::backprop::GradStore;
use candle_core::{Shape, Tensor, Var};
use layout::{OwnShard, Piece, Trained};
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use whole::Whole;

/// An optimizer that keeps each part of its state, and of the gradients, on one rank only: PyTorch's
/// `ZeroRedundancyOptimizer` (stage 1 of ZeRO), with sharded gradients (stage 2).
///
/// `R` is the update rule: the options of one of this crate's optimizers, or a rule of your own. For example,
/// `ZeroRedundancyOptimizer<ParamsAdamW>` trains like [`AdamW`](super::AdamW), with `1 / world_size` of its state on each rank. A rule
/// that needs whole parameters, such as [`Muon`](super::Muon), has each of them and its state on one rank, its owner: the largest
/// come first, each to the rank that has the fewest elements so far.
///
/// It trains a model of [`Sharding::Optimizer`](crate::Sharding::Optimizer) or [`Sharding::Blocks`](crate::Sharding::Blocks), whose
/// [`backward`](DistributedDataParallel::backward) reduce-scatters each bucket instead of all-reducing it, during the backward pass: each rank gets the mean gradients of its part, and the `GradStore` that
/// `backward` returns does **not** hold those of DDP's parameters. The memory of a bucket is then free for the next one, so that two
/// buckets have some at a time. Under [`no_sync`](DistributedDataParallel::no_sync) whole gradients accumulate, until the next
/// synchronised pass. [`step`](Optimizer::step) updates this rank's part
/// and all-gathers the parameters, one bucket while the next one is updated. (Before that, owners get the whole gradients of their
/// parameters, and send away parts of the new values.) When it returns, all variables are up to
/// date on all ranks. (Gathering does not continue into the next forward pass: candle cannot report when a variable is
/// read, so a program that then saves its model would save half of it.)
///
/// ```
/// use candle_core::{DType, Tensor};
/// use candle_ddp::optim::{Optimizer, ParamsAdamW, ZeroRedundancyOptimizer};
/// use candle_ddp::{DdpOptions, DistributedDataParallel, Sharding};
/// use candle_nn::{VarMap, linear};
///
/// # fn main() -> candle_ddp::Result<()> {
/// candle_ddp::spawn(2, |pg| {
///     let build = |vb| linear(4, 2, vb);
///     let options = DdpOptions { sharding: Sharding::Optimizer, ..Default::default() };
///     let ddp = DistributedDataParallel::with_options(&pg, &VarMap::new(), build, options)?;
///     let mut optimizer = ZeroRedundancyOptimizer::new(&ddp, ParamsAdamW::default())?;
///     for _ in 0..3 {
///         let x = Tensor::randn(0f32, 1.0, (8, 4), pg.device())?;
///         let mut grads = ddp.backward(&ddp.forward(&x)?.sqr()?.mean_all()?)?;
///         optimizer.clip_grad_norm(&mut grads, 1.0)?; // instead of the function of that name
///         optimizer.step(&grads)?;
///     }
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
pub struct ZeroRedundancyOptimizer<R> {
    reducer: Arc<Reducer>,
    process_group: ProcessGroup,
    /// The options of each parameter group.
    options: Vec<R>,
    /// DDP's parameters, in registration order.
    parameters: Vec<Trained>,
    /// One for each bucket.
    shards: Vec<OwnShard>,
    /// The parameters that are updated as a whole.
    wholes: Vec<Whole>,
    memory: Arc<BucketMemory>,
}

impl<R: UpdateRule> ZeroRedundancyOptimizer<R> {
    /// An optimizer with one set of options for all parameters whose gradients `ddp` averages. Every rank must call it.
    ///
    /// # Errors
    /// Returns an error on every rank for the reasons of [`FusedOptimizer`](super::FusedOptimizer), if `ddp` is not sharded or has
    /// another optimizer, if ranks give different options, or if the rule needs norms
    /// and `ddp` has [virtual ranks](crate::InitOptions::virtual_ranks).
    pub fn new<M>(ddp: &DistributedDataParallel<M>, options: R) -> Result<Self> {
        let parameters = ddp.averaged_parameters();
        Self::from_groups(ddp, vec![ParameterGroup { parameters, options }])
    }

    /// An optimizer with separate options for each group. The groups together must contain all parameters whose
    /// gradients `ddp` averages. Every rank must call it.
    ///
    /// # Errors
    /// Returns the errors of [`new`](Self::new); [`Error::Parameter`] for a parameter that is in two groups or in none,
    /// or whose gradient `ddp` does not average.
    pub fn from_groups<M>(ddp: &DistributedDataParallel<M>, groups: Vec<ParameterGroup<R>>) -> Result<Self> {
        let (reducer, process_group) = (ddp.reducer(), ddp.process_group().clone());
        let described = format!("{}: {:?}", R::NAME, groups.iter().map(describe).collect::<Vec<_>>());
        let built = layout::trained(ddp.averaged_parameters(), &groups).and_then(|trained| {
            let (shards, memory) = reducer.shards()?;
            if groups.iter().any(|group| needs_norms(&group.options)) {
                check_norms(&reducer)?;
            }
            Ok((trained, shards, memory))
        });
        let described = built.as_ref().map(|_| described);
        let verdict = label::ZERO_NEW.during(|| process_group.compare(described, "it could not make its optimizer"));
        let (parameters, shards, memory) = built?;
        if let Some((_, difference)) = verdict? {
            let reason = format!("ranks gave different options: {difference}");
            return Err(Error::invalid("groups", reason));
        }
        let options: Vec<R> = groups.into_iter().map(|group| group.options).collect();
        let (within, spread) = (reducer.groups().within(), reducer.groups().spread());
        let own = shards.into_iter().map(|shard| OwnShard::new(shard, (within.rank(), spread), &parameters, &options));
        let shards = own.collect::<Result<Vec<_>>>()?;
        let wholes = whole::wholes(&shards, &parameters, &options, (within, spread))?;
        Ok(Self { reducer, process_group, options, parameters, shards, wholes, memory })
    }

    /// Moves the optimizer to `ddp`, the model that was made anew with thawed parameters, and trains those in `group` as
    /// well: PyTorch's `add_param_group`. The old groups keep their options and their state; `group` begins without.
    /// Every rank must call it. Drop the old DDP model afterwards. A sharded model, which is made anew from another `VarMap`, must have the
    /// old names.
    ///
    /// For a moment, each rank needs memory for the state of all parameters.
    ///
    /// # Errors
    /// Returns the errors of [`from_groups`](Self::from_groups): the old groups and the new one together must contain all
    /// parameters whose gradients `ddp` averages. The optimizer is then unchanged.
    pub fn add_param_group<M>(&mut self, ddp: &DistributedDataParallel<M>, group: ParameterGroup<R>) -> Result<()> {
        let of_model: HashMap<String, Var> = ddp.averaged_parameters().into_iter().collect();
        let parameters = |number| {
            let own = self.parameters.iter().filter(|own| own.group == number);
            // A sharded model has new variables when it is made anew.
            own.map(|own| (own.name.clone(), of_model.get(&own.name).unwrap_or(&own.var).clone())).collect()
        };
        let old = self.options.iter().cloned().enumerate();
        let mut groups: Vec<_> =
            old.map(|(number, options)| ParameterGroup { parameters: parameters(number), options }).collect();
        groups.push(group);
        let state = self.state_dict()?;
        let mut moved = Self::from_groups(ddp, groups)?;
        moved.load_known(&state)?;
        *self = moved;
        Ok(())
    }

    /// Checks that `grads` holds no gradients of the parameters: their means are in the shards.
    fn check_synchronised(&self, grads: &GradStore) -> Result<()> {
        let Some(own) = self.parameters.iter().find(|own| grads.get(&own.var).is_some()) else { return Ok(()) };
        Err(own_gradient(&own.name))
    }

    fn update(&mut self, grads: &GradStore) -> Result<()> {
        self.check_synchronised(grads)?;
        let pending = self.reducer.pending()?;
        let scales = self.gradient_scales(&pending)?;
        let pending = pending.present;
        let needs_sums = self.options.iter().filter_map(R::fused).any(Fused::needs_sums);
        let sums = if needs_sums { self.sums(&pending, &scales)? } else { vec![Sums::default(); pending.len()] };
        self.update_wholes(&pending, &scales)?;
        let mut in_flight: Option<Gathering> = None;
        for shard in &self.shards {
            let (numbers, parts) = self.parts(shard, &pending, &scales)?;
            let sums: Vec<Sums> = numbers.into_iter().map(|number| sums[number]).collect();
            update::update(&parts, &sums)?;
            if self.parameters.iter().any(|parameter| parameter.placement.is_sharded()) {
                continue; // the model gathers them
            }
            let gathering = Gathering::start(shard, &self.parameters, &self.memory, &self.process_group)?;
            if let Some(previous) = in_flight.replace(gathering) {
                previous.finish(&self.parameters, &self.memory)?;
            }
        }
        if let Some(last) = in_flight {
            last.finish(&self.parameters, &self.memory)?;
        }
        for (parameter, pending) in self.parameters.iter_mut().zip(pending) {
            parameter.steps += u64::from(pending);
        }
        for model in Steps::of(grads) {
            model.made(
                self.parameters
                    .iter()
                    .map(|own| (&self.options[own.group], &own.var, number(&self.options[own.group], own.steps))),
            );
        }
        self.reducer.clear_pending()
    }

    /// Ends the group if a step that the other ranks wait for has failed.
    fn end_on_error(&self, result: &Result<()>) {
        if let Err(error) = result
            && !matches!(error, Error::InputsExhausted { .. })
            && self.process_group.world_size() > 1
        {
            self.process_group.abort(&format!("ZeroRedundancyOptimizer::step failed: {error}"));
        }
    }

    /// The updates of the pieces in a shard, and the numbers of the parameters they belong to.
    fn parts<'a>(
        &'a self,
        shard: &'a OwnShard,
        pending: &[bool],
        scales: &[f64],
    ) -> Result<(Vec<usize>, Vec<Part<'a, R>>)> {
        let (mut numbers, mut parts) = (Vec::new(), Vec::new());
        for piece in &shard.pieces {
            let takes_pieces = layout::takes_pieces(self.options_of(piece.parameter));
            if pending[piece.parameter] && takes_pieces {
                numbers.push(piece.parameter);
                parts.push(self.part(piece, &piece.values, shard.gradient(piece)?, None, scales)?);
            }
        }
        Ok((numbers, parts))
    }

    /// The update of the values of a piece, whose shape is theirs by default.
    fn part<'a>(
        &'a self,
        piece: &'a Piece,
        parameter: &'a Tensor,
        gradient: Tensor,
        shape: Option<&'a Shape>,
        scales: &[f64],
    ) -> Result<Part<'a, R>> {
        let states = &piece.states;
        let Trained { name, group, steps, .. } = &self.parameters[piece.parameter];
        let moment = Moment { step: steps + 1, gradient_scale: scales[*group] };
        let (rule, shape) = (&self.options[*group], shape.unwrap_or(parameter.shape()));
        Ok(Part { rule, name, moment, parameter, shape, gradient: gradient.to_dtype(parameter.dtype())?, states })
    }

    /// The factor for the gradients of each group.
    fn gradient_scales(&self, pending: &PendingGradients) -> Result<Vec<f64>> {
        let limited = self.options.iter().any(|options| max_grad_norm(options).is_some());
        let norm = if limited { self.norm(pending)? } else { 0. };
        Ok(self.options.iter().map(|options| pending.scale * limit(options, norm)).collect())
    }

    /// For each parameter, the sums that its update needs, over the parts of all ranks.
    fn sums(&self, pending: &[bool], scales: &[f64]) -> Result<Vec<Sums>> {
        let mut sums = vec![Sums::default(); pending.len()];
        for shard in &self.shards {
            let (numbers, parts) = self.parts(shard, pending, scales)?;
            for (number, [a, b]) in numbers.into_iter().zip(update::prepare(&parts)?) {
                let sums = &mut sums[number];
                (sums[0], sums[1]) = (sums[0] + a, sums[1] + b);
            }
        }
        let all = self.sum(sums.concat())?;
        Ok(all.chunks_exact(2).map(|sums| [sums[0], sums[1]]).collect())
    }

    /// Adds up the values of all ranks that have parts of the model.
    fn sum(&self, values: Vec<f64>) -> Result<Vec<f64>> {
        let values = Tensor::new(values, self.process_group.device())?;
        self.reducer.groups().within().all_reduce(&values, ReduceOp::Sum)?;
        Ok(values.to_vec1()?)
    }

    /// The norm of this rank's part of the gradients, unscaled.
    fn norm_here(&self, pending: &PendingGradients, norm_type: NormType) -> Result<f64> {
        let mut gradients = Vec::new();
        for shard in &self.shards {
            for piece in &shard.pieces {
                if pending.present[piece.parameter] {
                    gradients.push(shard.gradient(piece)?);
                }
            }
        }
        clip::total(gradients.iter(), norm_type)
    }

    /// The norm of all gradients over all ranks, scaled as in the next step.
    fn norm(&self, pending: &PendingGradients) -> Result<f64> {
        let squares = self.norm_here(pending, NormType::L2)?;
        Ok(self.sum(vec![squares])?[0].sqrt() * pending.scale)
    }

    /// The options of each group.
    pub fn options(&self) -> impl ExactSizeIterator<Item = &R> {
        self.options.iter()
    }

    /// The size in bytes of the optimizer state on this rank.
    pub fn state_bytes(&self) -> usize {
        let bytes = |state: &Tensor| state.elem_count() * state.dtype().size_in_bytes();
        self.pieces().flat_map(|piece| &piece.states).map(bytes).sum()
    }

    /// This rank's pieces in the order of buckets, followed by the parameters that it owns.
    fn pieces(&self) -> impl Iterator<Item = &Piece> {
        let owned = self.wholes.iter().filter_map(|whole| whole.own.as_ref());
        self.shards.iter().flat_map(|own| &own.pieces).chain(owned)
    }
}

/// The parameters of a bucket while they are gathered.
struct Gathering<'a> {
    shard: &'a Shard,
    storage: Tensor,
    work: Work,
}

impl<'a> Gathering<'a> {
    /// Starts gathering the variables' current values, of which every rank has its part.
    fn start(
        OwnShard { shard, pieces }: &'a OwnShard,
        parameters: &[Trained],
        memory: &BucketMemory,
        group: &ProcessGroup,
    ) -> Result<Self> {
        let (gradients, cut, first) = (&shard.own, &shard.cut, shard.parameters.first());
        // Gradients may have another dtype, to which the variables must not be rounded.
        let dtype = first.map_or(gradients.dtype(), |parameter| parameters[*parameter].var.dtype());
        let storage = memory.take(cut.length(), dtype, gradients.device())?;
        let whole = storage.narrow(0, 0, cut.length())?;
        let own = whole.narrow(0, group.rank() * cut.part(), cut.part())?;
        let places = pieces.iter().map(|piece| own.narrow(0, piece.offset, piece.values.elem_count()));
        let places = places.collect::<candle_core::Result<Vec<_>>>()?;
        copy::copy_all(places.iter().zip(pieces.iter().map(|piece| &piece.values)))?;
        let work = group.all_gather_async(&whole, &own)?;
        Ok(Self { shard, storage, work })
    }

    fn finish(self, parameters: &[Trained], memory: &BucketMemory) -> Result<()> {
        self.work.wait()?;
        let Shard { parameters: numbers, cut, .. } = self.shard;
        let values = (0..numbers.len()).map(|place| cut.whole(&self.storage, place)).collect::<Result<Vec<_>>>()?;
        copy::copy_all(numbers.iter().map(|parameter| &parameters[*parameter].flat).zip(&values))?;
        memory.give_back(self.storage);
        Ok(())
    }
}

/// Every rank must make every call.
impl<R: UpdateRule> Optimizer for ZeroRedundancyOptimizer<R> {
    /// Updates every parameter that has a gradient on any rank, once after each synchronised backward pass.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] without a new backward pass; [`Error::Parameter`] if `grads` holds gradients
    /// of the parameters, as after a backward pass under `no_sync`. A rank's error ends the group on all ranks.
    fn step(&mut self, grads: &GradStore) -> Result<()> {
        if is_skipped(grads) {
            return self.reducer.clear_pending();
        }
        let checked = scaled::check_unscaled(grads, "step").and_then(|()| self.lead_step());
        let result = checked.and_then(|()| label::ZERO_STEP.during(|| self.update(grads)));
        self.end_on_error(&result);
        result
    }

    fn learning_rates(&self) -> Vec<f64> {
        self.options.iter().map(R::learning_rate).collect()
    }

    fn set_learning_rates(&mut self, learning_rates: &[f64]) -> Result<()> {
        check_learning_rates(learning_rates, self.options.len())?;
        for (options, learning_rate) in self.options.iter_mut().zip(learning_rates) {
            options.set_learning_rate(*learning_rate);
        }
        Ok(())
    }

    /// Makes the next step scale the gradients down, since they are not in `grads`.
    ///
    /// # Errors
    /// Returns the errors of [`step`](Self::step), and [`Error::InvalidArgument`] for a negative or NaN `max_norm`, and
    /// under [virtual ranks](crate::InitOptions::virtual_ranks).
    fn clip_grad_norm(&mut self, grads: &mut GradStore, max_norm: f64) -> Result<f64> {
        clip::check_max_norm(max_norm)?;
        let unscaled = scaled::check_unscaled(grads, "clip_grad_norm");
        self.end_on_error(&unscaled);
        unscaled?;
        if is_skipped(grads) {
            return Ok(f64::NAN);
        }
        check_norms(&self.reducer)?;
        self.check_synchronised(grads)?;
        let pending = self.reducer.pending()?;
        self.process_group.announce(Operation::ClipGradNorm)?;
        let norm = label::ZERO_NORM.during(|| self.norm(&pending))?;
        self.reducer.scale_pending(clip::coefficient(norm, max_norm))?;
        Ok(norm)
    }

    /// Makes the next step divide the sharded gradients, and divides those of ignored parameters, which are in `grads`.
    ///
    /// # Errors
    /// Returns the errors of [`GradScaler::unscale`]; [`Error::InvalidArgument`] without a new backward pass.
    fn unscale(&mut self, scaler: &mut GradScaler, grads: &mut GradStore) -> Result<bool> {
        let pending = self.reducer.pending()?;
        let mut divided = 1.;
        let kept = self.parameters.first().map(|own| &own.var);
        let finite = scaler.unscale_sharded(grads, kept, |factor| {
            divided = factor;
            // As the next step will see them, in f32.
            let largest = self.norm_here(&pending, NormType::Inf)? * pending.scale * factor;
            Ok(!(largest as f32).is_finite())
        })?;
        self.reducer.scale_pending(divided)?;
        Ok(finite)
    }

    fn save_distributed(&self, _: &ProcessGroup, path: &Path) -> Result<()> {
        self.save(path)
    }

    fn load_distributed(&mut self, _: &ProcessGroup, path: &Path) -> Result<()> {
        self.load(path)
    }
}

impl<R: UpdateRule> std::fmt::Debug for ZeroRedundancyOptimizer<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = format!("ZeroRedundancyOptimizer<{}>", R::NAME);
        let groups = self.options.iter().enumerate().map(|(number, options)| {
            let parameters = self.parameters.iter().filter(move |parameter| parameter.group == number);
            (options, parameters.map(|parameter| &parameter.name).collect())
        });
        f.debug_struct(&name)
            .field("groups", &groups.collect::<Vec<(_, Vec<_>)>>())
            .field("state_bytes", &self.state_bytes())
            .finish_non_exhaustive()
    }
}

/// Whether updates depend on norms of gradients or parameters.
fn needs_norms<R: UpdateRule>(rule: &R) -> bool {
    rule.fused().is_some_and(Fused::needs_sums) || max_grad_norm(rule).is_some()
}

/// Refuses norms under virtual ranks: ranks add them up from their parts, whose sizes depend on the number of ranks.
fn check_norms(reducer: &Reducer) -> Result<()> {
    if reducer.virtual_ranks().is_none() {
        return Ok(());
    }
    Feature::Norms.goes_with(Feature::VirtualRanks)
}

/// Describes what ranks must agree on.
fn describe<R: UpdateRule>(group: &ParameterGroup<R>) -> (Vec<&str>, &R) {
    (group.parameters.iter().map(|(name, _)| name.as_str()).collect(), &group.options)
}
