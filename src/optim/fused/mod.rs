//! The optimizer around an update rule: parameters, groups, counters and state. Each rank has all of these, or a part.
mod join;
mod owners;
mod sharded;
mod slot;
mod state;
mod step;
mod whole;

use super::clip;
use super::optimizer::{Optimizer, check_learning_rates};
use super::parameters::ParameterGroup;
use super::rule::{self, UpdateRule};
use crate::amp::GradScaler;
use crate::backend::Purpose;
use crate::ddp::gradients::left_out::{is_skipped, late_verdict};
use crate::ddp::gradients::scaled;
use crate::ddp::gradients::steps::Steps;
use crate::ddp::gradients::verdict::Verdict;
use crate::process_group::{Operation, ProcessGroup};
use crate::state::StateDict;
use crate::variables::Parameters;
use crate::{Error, Result};
use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use sharded::Sharded;
use slot::{Piece, Slot};
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

static OPTIMIZER_NEW: Purpose = Purpose::of("FusedOptimizer::new");
static OPTIMIZER_STEP: Purpose = Purpose::of("Optimizer::step");
static OPTIMIZER_NORM: Purpose = Purpose::of("Optimizer::clip_grad_norm");

/// An optimizer that reads parameter, gradient and state in one pass: [`AdamW`](super::AdamW), [`Adam`](super::Adam),
/// [`Sgd`](super::Sgd), [`Lamb`](super::Lamb) and [`Muon`](super::Muon). With an [`UpdateRule`] of your own, it updates one parameter after
/// the other by candle's operations.
///
/// Parameters may be f32, f64, f16 or bf16. 16-bit parameters are updated in f32 arithmetic and have f32 state.
/// Variables of integer type are left alone. As in PyTorch, a step does not change parameters without a gradient, nor
/// their state.
///
/// On a GPU all parameters of a dtype are updated together, with as many kernel launches as a single parameter needs:
/// one, or three for LAMB, which also waits once for the norm of the gradients if `max_grad_norm` is set.
///
/// An optimizer can be saved if its parameters have names. It implements [`Optimizer`] and also candle's trait of that
/// name.
///
/// # Sharded models
/// An optimizer of a [`DistributedDataParallel`](crate::DistributedDataParallel) model follows its
/// [`DdpOptions::sharding`](crate::DdpOptions::sharding); [`Sharding`](crate::Sharding) has an example. Each part of the state and of the
/// gradients is then on one rank only, or, with `ranks`, on one of so many: PyTorch's `ZeroRedundancyOptimizer` with sharded gradients.
/// A rule that needs whole parameters, such as Muon, has each of them and its state on one rank, its owner.
///
/// [`backward`](crate::DistributedDataParallel::backward) gives each rank the mean gradients of its part, and the `GradStore` that it
/// returns does **not** hold the averaged parameters' gradients. Passes under [`no_sync`](crate::DistributedDataParallel::no_sync) do the
/// same, and add up the parts. [`step`](Optimizer::step) updates this rank's part and all-gathers the parameters: when it returns, all
/// variables are up to date on all ranks. (Gathering does not continue into the next forward pass: candle cannot report when a variable
/// is read, so a program that then saves its model would save half of it.) `docs/memory.md` says what is sent, and what takes memory.
///
/// Every rank must make the optimizer, before the first backward pass, and make every call. A model has one optimizer at a time, which
/// trains all of its averaged parameters. [Ignored](crate::Role::Ignored) ones, and others, may be among its parameters: each rank updates
/// them by itself, with the gradients in the store.
pub struct FusedOptimizer<R> {
    /// The options of each group.
    options: Vec<R>,
    /// The slots of a sharded model come first, in the order of registration.
    slots: Vec<Slot>,
    /// The parameters that this rank updates by itself, with the gradients in a store.
    pieces: Vec<Piece>,
    sharded: Option<Sharded>,
    named: bool,
    /// Whether only some parameters have made the last step.
    is_torn: bool,
    /// The verdicts on the last step, or its parts, that the parameters' numbers of steps do not take into account yet, and the parameters
    /// that have made the step unless it is bad.
    late: Vec<(Arc<Verdict>, Vec<usize>)>,
}

impl<R: UpdateRule> FusedOptimizer<R> {
    /// An optimizer for these [parameters](Parameters), such as a `&DistributedDataParallel` or a `&VarMap`. With a
    /// `Vec<Var>`, it cannot be saved, and error messages refer to variables by index.
    ///
    /// ```
    /// # use candle_ddp::DistributedDataParallel;
    /// # use candle_ddp::optim::{AdamW, ParamsAdamW};
    /// # use candle_nn::{VarMap, linear};
    /// # fn main() -> candle_ddp::Result<()> {
    /// # candle_ddp::spawn(2, |pg| {
    /// # let build = |vb| linear(4, 2, vb);
    /// # let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), build)?;
    /// let optimizer = AdamW::new(&ddp, ParamsAdamW { lr: 0.01, ..Default::default() })?;
    /// # Ok(())
    /// # })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for invalid options; [`Error::Parameter`] for a parameter that is given
    /// twice, has a dtype that cannot be trained, or is not contiguous.
    ///
    /// For a sharded model also, on every rank: if ranks give different options, if the model has another optimizer, if the rule needs norms
    /// and the model has [virtual ranks](crate::InitOptions::virtual_ranks), and for an averaged parameter of the model that is not given.
    pub fn new(parameters: impl Into<Parameters>, options: R) -> Result<Self> {
        let Parameters { variables, named } = parameters.into();
        Self::of_groups(vec![ParameterGroup { parameters: variables, options }], named)
    }

    /// An optimizer with separate options for each group of parameters.
    ///
    /// # Errors
    /// Returns the errors of [`new`](Self::new).
    pub fn from_groups(groups: Vec<ParameterGroup<R>>) -> Result<Self> {
        Self::of_groups(groups, true)
    }

    pub(super) fn of_groups(groups: Vec<ParameterGroup<R>>, named: bool) -> Result<Self> {
        let model = Steps::sharded(groups.iter().flat_map(|group| &group.parameters).map(|(_, var)| var));
        let Some((model, reducer)) = model.as_ref().and_then(|model| Some((model, model.sharded_by()?))) else {
            let (options, slots, pieces, sharded) = Default::default();
            let mut optimizer = Self { options, slots, pieces, sharded, named, is_torn: false, late: Vec::new() };
            optimizer.push(groups)?;
            return Ok(optimizer);
        };
        let built = slot::slots(groups, &[], 0).and_then(|(options, mut slots)| {
            let count = slot::of_model_first(&mut slots, Some(model.as_ref()))?;
            if options.iter().any(sharded::needs_norms) {
                sharded::check_norms(reducer)?;
            }
            Ok((options, slots, count, reducer.shards()?))
        });
        let described = built.as_ref().map(|(options, slots, count, _)| {
            let names = |group| slots[..*count].iter().filter(move |slot| slot.group == group).map(|slot| &slot.name);
            let groups = options.iter().enumerate().map(|(group, options)| (names(group).collect::<Vec<_>>(), options));
            format!("{}: {:?}", R::NAME, groups.collect::<Vec<_>>())
        });
        let process_group = reducer.groups().main();
        let verdict = OPTIMIZER_NEW.during(|| process_group.compare(described, "it could not make its optimizer"));
        let (options, slots, count, shards) = built?;
        if let Some((_, difference)) = verdict? {
            let reason = format!("ranks gave different options: {difference}");
            return Err(Error::invalid("groups", reason));
        }
        let sharded = Some(Sharded::new(Arc::clone(reducer), shards, &slots, &options)?);
        let others = slots.iter().enumerate().skip(count);
        let pieces = others.map(|own| Piece::whole(own, &options[own.1.group])).collect::<Result<_>>()?;
        Ok(Self { options, slots, pieces, sharded, named, is_torn: false, late: Vec::new() })
    }

    /// Trains the parameters of `group` as well, with its options and without state: PyTorch's `add_param_group`, for
    /// layers that are thawed during training. The state of the others is kept. A schedule takes up the new group with
    /// its next step.
    ///
    /// Under sharding, the optimizer moves to the model that was made anew with the thawed parameters, of which the old groups and the new one
    /// must contain all. If it was made from another `VarMap`, the old parameters must have the old names. Every rank must call it, and drop
    /// the old model afterwards. For a moment, each rank needs memory for the state of all parameters.
    ///
    /// # Errors
    /// Returns the errors of [`new`](Self::new), also for a parameter that the optimizer has already. It is then
    /// unchanged.
    pub fn add_param_group(&mut self, group: ParameterGroup<R>) -> Result<()> {
        let model = Steps::sharded(group.parameters.iter().map(|(_, var)| var));
        if self.sharded.is_none() && model.is_none() {
            return self.push(vec![group]);
        }
        // The model has new variables if it was made from another VarMap.
        let of_model: HashMap<&String, &Var> = match (&self.sharded, &model) {
            (Some(_), Some(model)) => model.averaged().collect(),
            _ => HashMap::new(),
        };
        let parameters = |number| {
            let own = self.slots.iter().filter(|slot| slot.group == number);
            own.map(|slot| (slot.name.clone(), of_model.get(&slot.name).copied().unwrap_or(&slot.var).clone()))
                .collect()
        };
        let old = self.options.iter().cloned().enumerate();
        let mut groups: Vec<_> =
            old.map(|(number, options)| ParameterGroup { parameters: parameters(number), options }).collect();
        groups.push(group);
        let state = self.state_dict()?;
        let mut moved = Self::of_groups(groups, self.named)?;
        moved.load_known(&state)?;
        *self = moved;
        Ok(())
    }

    /// Adds groups of parameters that this rank updates by itself.
    fn push(&mut self, groups: Vec<ParameterGroup<R>>) -> Result<()> {
        let (options, mut slots) = slot::slots(groups, &self.slots, self.options.len())?;
        slot::of_model_first(&mut slots, None)?;
        let known = self.slots.len();
        let numbered = slots.iter().enumerate().map(|(index, slot)| (known + index, slot));
        let rule = |slot: &Slot| &options[slot.group - self.options.len()];
        let pieces = numbered.map(|own| Piece::whole(own, rule(own.1))).collect::<Result<Vec<_>>>()?;
        self.options.extend(options);
        self.slots.extend(slots);
        self.pieces.extend(pieces);
        Ok(())
    }

    /// The options of each group.
    pub fn options(&self) -> impl ExactSizeIterator<Item = &R> {
        self.options.iter()
    }

    /// Changes the options of group `group`. The state of its parameters is kept, so options that need another state
    /// are refused (such as SGD with momentum after SGD without).
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for a group that does not exist, invalid options, or options that need
    /// another state.
    pub fn set_options(&mut self, group: usize, options: R) -> Result<()> {
        rule::check(&options)?;
        let count = self.options.len();
        let Some(old) = self.options.get_mut(group) else {
            return Err(Error::invalid("group", format!("there is no group {group}: the optimizer has {count}")));
        };
        if options.states() != old.states() {
            let (needed, kept) = (options.states(), old.states());
            let reason = format!("they need the states {needed:?}, but the optimizer has {kept:?}");
            return Err(Error::invalid("options", reason));
        }
        *old = options;
        Ok(())
    }

    /// The size in bytes of the optimizer state on this rank.
    pub fn state_bytes(&self) -> usize {
        let bytes = |state: &Tensor| state.elem_count() * state.dtype().size_in_bytes();
        self.pieces().flat_map(|piece| &piece.states).map(bytes).sum()
    }

    fn named(&self) -> impl Iterator<Item = (&String, &Var)> + Clone {
        self.slots.iter().map(|slot| (&slot.name, &slot.var))
    }

    /// All that this rank updates.
    fn pieces(&self) -> impl Iterator<Item = &Piece> {
        self.pieces.iter().chain(self.sharded.iter().flat_map(Sharded::pieces))
    }

    fn options_of(&self, parameter: usize) -> &R {
        &self.options[self.slots[parameter].group]
    }

    /// Whether its kernels can leave out a step by themselves.
    fn may_judge(&self) -> bool {
        let may = |options: &R| {
            let rule = options.fused().filter(|_| rule::max_grad_norm(options).is_none());
            rule.is_some_and(|fused| !fused.needs_sums())
        };
        let Some(first) = self.slots.first().filter(|_| self.sharded.is_none()) else { return false };
        let device = first.var.device();
        device.is_cuda()
            && self.options().all(may)
            && self.slots.iter().all(|slot| slot.var.device().same_device(device))
    }

    /// Whether its kernels can leave out a step by this verdict.
    fn may_judge_by(&self, verdict: &Verdict) -> bool {
        let at = verdict.numbers().map(Tensor::device);
        self.may_judge() && self.slots.first().zip(at).is_some_and(|(slot, at)| slot.var.device().same_device(at))
    }

    /// The parameters that have not made the last step, since it was left out. Waits for the verdict.
    fn left_out(&self) -> Result<Vec<usize>> {
        let mut left_out = Vec::new();
        for (verdict, parameters) in &self.late {
            if verdict.is_bad()? {
                left_out.extend(parameters);
            }
        }
        Ok(left_out)
    }

    /// Takes the verdicts on the last step into account.
    fn settle(&mut self) -> Result<()> {
        self.left_out()?.into_iter().for_each(|parameter| self.slots[parameter].steps -= 1);
        self.late.clear();
        Ok(())
    }

    /// Makes a step, or a part of one, where the gradients are not sharded.
    fn apply_all(&mut self, grads: &GradStore) -> Result<()> {
        match late_verdict(grads)? {
            Some(verdict) if self.may_judge_by(&verdict) => self.apply(grads, Some(&verdict)),
            Some(verdict) if verdict.is_bad()? => Ok(()),
            _ => self.apply(grads, None),
        }
    }

    /// Refuses an optimizer whose last step has failed in its middle.
    fn check_whole(&self) -> Result<()> {
        if !self.is_torn {
            return Ok(());
        }
        let reason = "its last step, in backward_and_step, failed after some parameters had been updated, so that they and their state are \
                      a step ahead of the others: load the model and the optimizer's state from a checkpoint, or make both anew";
        Err(Error::invalid("optimizer", reason))
    }
}

impl<R: UpdateRule> Optimizer for FusedOptimizer<R> {
    /// Updates every parameter that has a gradient; under sharding, on any rank, once after each synchronised backward pass.
    ///
    /// # Errors
    /// Under sharding, [`Error::InvalidArgument`] without a new backward pass; [`Error::Parameter`] if `grads` holds gradients
    /// of the averaged parameters or comes from a backward pass under `no_sync`. A rank's error ends the group on all ranks.
    fn step(&mut self, grads: &GradStore) -> Result<()> {
        self.check_whole()?;
        self.settle()?;
        let Some(sharded) = &self.sharded else { return self.apply_all(grads) };
        if is_skipped(grads) {
            return sharded.reducer.clear_pending();
        }
        let checked = scaled::check_unscaled(grads, "step").and_then(|()| self.lead_step(sharded));
        let result = checked.and_then(|()| OPTIMIZER_STEP.during(|| self.apply(grads, None)));
        self.sharded.iter().for_each(|sharded| sharded.end_on_error(&result));
        result
    }

    fn takes_parts(&self) -> Result<bool> {
        self.check_whole()?;
        Ok(self.sharded.is_none() && self.options().all(|options| rule::max_grad_norm(options).is_none()))
    }

    fn step_part(&mut self, grads: &GradStore, is_last: bool) -> Result<()> {
        if !self.is_torn {
            self.settle()?;
        }
        self.is_torn = true;
        self.apply_all(grads)?;
        self.is_torn = !is_last;
        Ok(())
    }

    fn step_scaled(&mut self, scaler: &mut GradScaler, grads: &mut GradStore) -> Result<()> {
        self.check_whole()?;
        if self.may_judge() && scaler.is_scaled() {
            self.unscale(scaler, grads)?;
        }
        if let Some(verdict) = scaler.verdict_on_gpu().filter(|verdict| self.may_judge_by(verdict)) {
            self.settle()?;
            self.apply(grads, Some(&verdict))?;
            scaler.has_stepped(verdict);
            return Ok(());
        }
        scaler.step_on_host(self, grads)
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

    /// Under sharding, makes the next step scale the averaged gradients down, since they are not in `grads`, and scales the others.
    ///
    /// # Errors
    /// Under sharding also the errors of [`step`](Self::step), and [`Error::InvalidArgument`] under
    /// [virtual ranks](crate::InitOptions::virtual_ranks).
    fn clip_grad_norm(&mut self, grads: &mut GradStore, max_norm: f64) -> Result<Tensor> {
        let vars: Vec<Var> = self.pieces.iter().map(|piece| self.slots[piece.parameter].var.clone()).collect();
        let Some(sharded) = &self.sharded else {
            return clip::clip(grads, &vars, max_norm, clip::ClipOptions::default());
        };
        clip::check_max_norm(max_norm)?;
        let unscaled = scaled::check_unscaled(grads, "clip_grad_norm");
        sharded.end_on_error(&unscaled);
        unscaled?;
        if is_skipped(grads) {
            return clip::as_tensor(f64::NAN, &vars);
        }
        sharded::check_norms(&sharded.reducer)?;
        let pending = sharded.pending(&self.slots, grads)?;
        sharded.process_group().announce(Operation::ClipGradNorm)?;
        let norm = OPTIMIZER_NORM.during(|| sharded.norm(&pending))?;
        let scale = clip::coefficient(norm, max_norm);
        clip::scale(grads, &vars, scale)?;
        sharded.reducer.scale_pending(scale)?;
        clip::as_tensor(norm, &vars)
    }

    /// Under sharding, makes the next step divide the averaged gradients, and divides the others, which are in `grads`.
    ///
    /// # Errors
    /// Returns the errors of [`GradScaler::unscale`]; under sharding, [`Error::InvalidArgument`] without a new backward pass.
    fn unscale(&mut self, scaler: &mut GradScaler, grads: &mut GradStore) -> Result<()> {
        let Some(sharded) = &self.sharded else { return scaler.unscale_with(grads, self.named()) };
        let pending = sharded.reducer.pending()?;
        let mut divided = 1.;
        let kept = self.slots.first().map(|slot| &slot.var);
        scaler.unscale_sharded(grads, kept, |factor| {
            divided = factor;
            // As the next step will see them, in f32.
            let largest = sharded.norm_here(&pending, clip::NormType::Inf)? * pending.scale * factor;
            Ok(!(largest as f32).is_finite())
        })?;
        sharded.reducer.scale_pending(divided)
    }

    fn save_distributed(&self, group: &ProcessGroup, path: &Path) -> Result<()> {
        self.save_together(self.sharded.as_ref().map_or(group, Sharded::process_group), path)
    }
}

/// Implements candle's trait.
impl<R: UpdateRule> candle_nn::Optimizer for FusedOptimizer<R> {
    type Config = R;

    /// An optimizer for variables without names. It cannot be saved, and error messages refer to variables by index.
    fn new(vars: Vec<Var>, options: R) -> candle_core::Result<Self> {
        Ok(Self::new(vars, options)?)
    }

    /// Updates every parameter that has a gradient.
    fn step(&mut self, grads: &GradStore) -> candle_core::Result<()> {
        Ok(Optimizer::step(self, grads)?)
    }

    /// The learning rate of the first group.
    fn learning_rate(&self) -> f64 {
        Optimizer::learning_rate(self)
    }

    /// Gives all groups the same learning rate.
    fn set_learning_rate(&mut self, learning_rate: f64) {
        self.options.iter_mut().for_each(|options| options.set_learning_rate(learning_rate));
    }
}

/// Shows each group's options and the names of its parameters, and the size of the state.
impl<R: UpdateRule> std::fmt::Debug for FusedOptimizer<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let groups = self.options.iter().enumerate().map(|(number, options)| {
            let slots = self.slots.iter().filter(move |slot| slot.group == number);
            (options, slots.map(|slot| &slot.name).collect())
        });
        f.debug_struct(&format!("FusedOptimizer<{}>", R::NAME))
            .field("groups", &groups.collect::<Vec<(_, Vec<_>)>>())
            .field("state_bytes", &self.state_bytes())
            .field("is_sharded", &self.sharded.is_some())
            .finish_non_exhaustive()
    }
}
