//! The optimizer around an update rule: parameters, groups, counters and state.
use super::clip;
use super::kernel::{Fused, Moment};
use super::optimizer::{Optimizer, check_learning_rates};
use super::parameters::ParameterGroup;
use super::rule::{self, UpdateRule, limit, state_dtype};
use super::update::{self, Part, misfit};
use crate::amp::{GradScaler, Verdict};
use crate::ddp::steps::Steps;
use crate::ddp::{check_averaged, scaled};
use crate::error::describe;
use crate::kernels;
use crate::placement::Placement;
use crate::state::{self, Loader, PutInPlace, Saved, StateDict};
use crate::tensor::DTYPES;
use crate::variables::{Parameters, check_named, check_whole};
use crate::{Error, Result};
use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, TensorId, Var};
use std::collections::{HashMap, HashSet};

/// An optimizer that reads parameter, gradient and state in one pass: [`AdamW`](super::AdamW), [`Adam`](super::Adam),
/// [`Sgd`](super::Sgd) and [`Lamb`](super::Lamb). With an [`UpdateRule`] of your own, it updates one parameter after the
/// other by candle's operations.
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
#[derive(Debug)]
pub struct FusedOptimizer<R> {
    groups: Vec<Group<R>>,
    pub(super) named: bool,
    /// Whether only some parameters have made the last step.
    is_torn: bool,
}

#[derive(Debug)]
struct Group<R> {
    options: R,
    slots: Vec<Slot>,
}

/// For which parameters need names.
const SAVED: &str = "an optimizer to be saved or loaded";

/// The key of a state that was saved after a step had failed in its middle. An optimizer that loads it refuses to continue.
const TORN: &str = "failed_step";

/// The parameters that an optimizer has already.
#[derive(Default)]
struct Seen {
    names: HashSet<String>,
    variables: HashSet<TensorId>,
}

/// A parameter and its state.
struct Slot {
    name: String,
    var: Var,
    /// The variable's storage in one dimension.
    flat: Tensor,
    /// One-dimensional, each with its own storage.
    states: Vec<Tensor>,
    steps: u64,
}

/// Shows the parameter without its values.
impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let parameter = describe(self.var.dtype(), self.var.shape());
        f.debug_struct("Slot")
            .field("name", &self.name)
            .field("parameter", &parameter)
            .field("steps", &self.steps)
            .finish()
    }
}

impl Slot {
    fn new<R: UpdateRule>(name: String, var: Var, options: &R) -> Result<Self> {
        let dtype = state_dtype_of::<R>(&name, &var)?;
        let flat = var.as_detached_tensor().flatten_all()?;
        let states = options.states().iter().map(|_| Tensor::zeros(flat.shape(), dtype, flat.device()));
        let states = states.collect::<candle_core::Result<_>>()?;
        Ok(Self { name, var, flat, states, steps: 0 })
    }

    /// The gradient in the form that the kernels need.
    fn gradient<R: UpdateRule>(&self, grads: &GradStore, options: &R) -> Result<Option<Tensor>> {
        let Some(gradient) = grads.get(&self.var) else { return Ok(None) };
        if gradient.shape() != self.var.shape() || !gradient.device().same_device(self.var.device()) {
            return Err(Error::parameter(&self.name, format!("its gradient {}", misfit(gradient, &self.var))));
        }
        let takes = |fused: Fused| fused.rule().takes(self.var.dtype(), gradient.dtype());
        let gradient = match self.var.device().is_cuda() && options.fused().is_some_and(takes) {
            true => gradient.detach(),
            false => gradient.detach().to_dtype(self.var.dtype())?,
        };
        Ok(Some(gradient.contiguous()?.flatten_all()?))
    }

    /// The name of a part of its state in a state dict.
    fn key(&self, part: &str) -> String {
        key(&self.name, part)
    }
}

/// The entry of a parameter's state.
pub(super) fn key(parameter: &str, part: &str) -> String {
    format!("state.{parameter}.{part}")
}

/// The number of steps, if the next one depends on it.
pub(super) fn number<R: UpdateRule>(options: &R, steps: u64) -> Option<u64> {
    (!options.states().is_empty()).then_some(steps)
}

/// The dtype of `R`'s state for a parameter, if `R` can update it.
pub(super) fn state_dtype_of<R: UpdateRule>(name: &str, var: &Var) -> Result<DType> {
    let Some(dtype) = state_dtype(var.dtype()) else {
        let (dtype, supported) = (var.dtype(), DTYPES.map(|dtype| dtype.as_str()).join(", "));
        let reason = format!("its dtype must be one that {} can update ({supported}), but is {dtype:?}", R::NAME);
        return Err(Error::parameter(name, reason));
    };
    if !var.device().is_cpu() && !kernels::take(var.device(), var.dtype()) {
        let reason = format!("{} cannot update it on {:?}", R::NAME, var.device().location());
        return Err(Error::parameter(name, reason));
    }
    if !var.is_contiguous() {
        let reason = "its variable must be contiguous: make it from a contiguous tensor";
        return Err(Error::parameter(name, reason));
    }
    Ok(dtype)
}

impl<R: UpdateRule> FusedOptimizer<R> {
    /// An optimizer for these [parameters](Parameters), such as those of a `&DistributedDataParallel` or a `&VarMap`. With a
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
    pub fn new(parameters: impl Into<Parameters>, options: R) -> Result<Self> {
        let Parameters { variables, named } = parameters.into();
        let group = ParameterGroup { parameters: variables, options };
        Ok(Self { named, ..Self::from_groups(vec![group])? })
    }

    /// An optimizer with separate options for each group of parameters.
    ///
    /// # Errors
    /// Returns the errors of [`new`](Self::new).
    pub fn from_groups(groups: Vec<ParameterGroup<R>>) -> Result<Self> {
        let mut optimizer = Self { groups: Vec::with_capacity(groups.len()), named: true, is_torn: false };
        let mut seen = Seen::default();
        groups.into_iter().try_for_each(|group| optimizer.push(group, &mut seen))?;
        Ok(optimizer)
    }

    /// Trains the parameters of `group` as well, with its options and without state: PyTorch's `add_param_group`, for
    /// layers that are thawed during training. The state of the others is kept. A schedule takes up the new group with
    /// its next step.
    ///
    /// # Errors
    /// Returns the errors of [`new`](Self::new), also for a parameter that the optimizer has already. It is then
    /// unchanged.
    pub fn add_param_group(&mut self, group: ParameterGroup<R>) -> Result<()> {
        let mut seen = Seen {
            names: self.slots().map(|slot| slot.name.clone()).collect(),
            variables: self.slots().map(|slot| slot.var.id()).collect(),
        };
        self.push(group, &mut seen)
    }

    /// Adds a group whose parameters have not been `seen`.
    fn push(&mut self, group: ParameterGroup<R>, seen: &mut Seen) -> Result<()> {
        let ParameterGroup { parameters, options } = group;
        rule::check(&options)?;
        let mut slots = Vec::with_capacity(parameters.len());
        for (name, var) in parameters {
            if !seen.names.insert(name.clone()) {
                let reason = "two parameters have this name: build each model under a prefix, such as vb.pp(\"encoder\"), \
                              or make an optimizer for each";
                return Err(Error::parameter(name, reason));
            }
            if !seen.variables.insert(var.id()) {
                return Err(Error::parameter(name, "its variable is given twice, and would be updated twice"));
            }
            if let Some(reason) = options.refuses(&var) {
                return Err(Error::parameter(name, reason));
            }
            check_whole([(&name, &var)], "use ZeroRedundancyOptimizer")?;
            if var.dtype().is_float() {
                slots.push(Slot::new(name, var, &options)?);
            }
        }
        self.groups.push(Group { options, slots });
        Ok(())
    }

    /// The options of each group.
    pub fn options(&self) -> impl ExactSizeIterator<Item = &R> {
        self.groups.iter().map(|group| &group.options)
    }

    /// Changes the options of group `group`. The state of its parameters is kept, so options that need another state
    /// are refused (such as SGD with momentum after SGD without).
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for a group that does not exist, invalid options, or options that need
    /// another state.
    pub fn set_options(&mut self, group: usize, options: R) -> Result<()> {
        rule::check(&options)?;
        let count = self.groups.len();
        let Some(group) = self.groups.get_mut(group) else {
            return Err(Error::invalid("group", format!("there is no group {group}: the optimizer has {count}")));
        };
        if options.states() != group.options.states() {
            let (needed, kept) = (options.states(), group.options.states());
            let reason = format!("they need the states {needed:?}, but the optimizer has {kept:?}");
            return Err(Error::invalid("options", reason));
        }
        group.options = options;
        Ok(())
    }

    /// The names of the trained parameters, group by group.
    pub fn parameter_names(&self) -> impl Iterator<Item = &str> {
        self.slots().map(|slot| slot.name.as_str())
    }

    fn named(&self) -> impl Iterator<Item = (&String, &Var)> {
        self.slots().map(|slot| (&slot.name, &slot.var))
    }

    fn slots(&self) -> impl Iterator<Item = &Slot> {
        self.groups.iter().flat_map(|group| &group.slots)
    }

    /// Whether its kernels can leave out a step by themselves.
    fn may_judge(&self) -> bool {
        let may = |options: &R| {
            let rule = options.fused().filter(|_| rule::max_grad_norm(options).is_none());
            rule.is_some_and(|fused| !fused.needs_sums())
        };
        let Some(first) = self.slots().next() else { return false };
        let device = first.var.device();
        device.is_cuda() && self.options().all(may) && self.slots().all(|slot| slot.var.device().same_device(device))
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

    /// After a bad `verdict`, this is no step.
    fn apply(&mut self, grads: &GradStore, verdict: Option<&Verdict>) -> Result<()> {
        scaled::check_unscaled(grads, "step")?;
        check_averaged(grads, self.named())?;
        // Check everything before changing anything.
        let gradients: Vec<Vec<Option<Tensor>>> = self
            .groups
            .iter()
            .map(|group| group.slots.iter().map(|slot| slot.gradient(grads, &group.options)).collect())
            .collect::<Result<_>>()?;
        let norm = if self.options().any(|options| rule::max_grad_norm(options).is_some()) {
            let present = self.slots().zip(gradients.iter().flatten());
            let present = present.filter_map(|(slot, gradient)| Some((&slot.var, gradient.as_ref()?))).collect();
            let measured = clip::without_ignored(grads, present, |(var, _)| var);
            clip::norm(measured.into_iter().map(|(_, gradient)| gradient), clip::NormType::L2)?
        } else {
            0.
        };
        let mut parts = Vec::new();
        for (Group { options, slots }, gradients) in self.groups.iter().zip(&gradients) {
            let gradient_scale = limit(options, norm);
            for (slot, gradient) in slots.iter().zip(gradients) {
                let Some(gradient) = gradient.clone() else { continue };
                let moment = Moment { step: slot.steps + 1, gradient_scale };
                let Slot { name, var, flat: parameter, states, .. } = slot;
                let shape = var.shape();
                parts.push(Part { rule: options, name, moment, parameter, shape, gradient, states });
            }
        }
        update::update_whole(&parts, verdict)?;
        if verdict.map_or(Ok(false), Verdict::is_bad)? {
            return Ok(());
        }
        let slots = self.groups.iter_mut().flat_map(|group| &mut group.slots);
        for (slot, gradient) in slots.zip(gradients.iter().flatten()) {
            slot.steps += u64::from(gradient.is_some());
        }
        for model in Steps::of(grads) {
            let slots = self.groups.iter().flat_map(|group| group.slots.iter().map(|slot| (&group.options, slot)));
            model.made(slots.map(|(options, slot)| (options, &slot.var, number(options, slot.steps))));
        }
        Ok(())
    }
}

impl<R: UpdateRule> Optimizer for FusedOptimizer<R> {
    fn step(&mut self, grads: &GradStore) -> Result<()> {
        self.check_whole()?;
        self.apply(grads, None)
    }

    fn takes_parts(&self) -> Result<bool> {
        self.check_whole()?;
        Ok(self.options().all(|options| rule::max_grad_norm(options).is_none()))
    }

    fn step_part(&mut self, grads: &GradStore, is_last: bool) -> Result<()> {
        self.is_torn = true;
        self.apply(grads, None)?;
        self.is_torn = !is_last;
        Ok(())
    }

    fn step_scaled(&mut self, scaler: &mut GradScaler, grads: &mut GradStore) -> Result<bool> {
        self.check_whole()?;
        if self.may_judge()
            && let Some(verdict) = scaler.judge_on_gpu(grads, self.named())?
        {
            let stepped = self.apply(grads, Some(&verdict));
            return scaler.conclude(grads, &verdict, stepped);
        }
        scaler.step_on_host(self, grads)
    }

    fn learning_rates(&self) -> Vec<f64> {
        self.options().map(R::learning_rate).collect()
    }

    fn set_learning_rates(&mut self, learning_rates: &[f64]) -> Result<()> {
        check_learning_rates(learning_rates, self.groups.len())?;
        for (group, learning_rate) in self.groups.iter_mut().zip(learning_rates) {
            group.options.set_learning_rate(*learning_rate);
        }
        Ok(())
    }

    fn clip_grad_norm(&mut self, grads: &mut GradStore, max_norm: f64) -> Result<f64> {
        let vars: Vec<Var> = self.slots().map(|slot| slot.var.clone()).collect();
        clip::clip(grads, &vars, max_norm, clip::ClipOptions::default())
    }

    fn unscale(&mut self, scaler: &mut GradScaler, grads: &mut GradStore) -> Result<bool> {
        scaler.unscale_with(grads, self.named())
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
        for group in &mut self.groups {
            group.options.set_learning_rate(learning_rate);
        }
    }
}

/// Contains `state.{name}.step` and the state under PyTorch's names (`state.{name}.exp_avg`) for each parameter, and
/// the groups' `learning_rates`. The program must keep the other options itself.
impl<R: UpdateRule> StateDict for FusedOptimizer<R> {
    fn state_dict(&self) -> Result<HashMap<String, Tensor>> {
        check_named(self.named, SAVED)?;
        let mut dict = state::begin(R::NAME)?;
        if self.is_torn {
            dict.insert(TORN.to_string(), state::count(1)?);
        }
        dict.insert("learning_rates".to_string(), state::list(&self.learning_rates())?);
        for Group { options, slots } in &self.groups {
            for slot in slots {
                dict.insert(slot.key("step"), state::count(slot.steps)?);
                for (part, state) in options.states().iter().zip(&slot.states) {
                    dict.insert(slot.key(part), state.reshape(slot.var.shape())?);
                }
            }
        }
        Ok(dict)
    }

    fn load_state_dict(&mut self, dict: &HashMap<String, Tensor>) -> Result<()> {
        self.prepare(Saved::Whole(dict.clone()), 0, 1)?()
    }

    /// Also of the shards of a [`ZeroRedundancyOptimizer`](super::ZeroRedundancyOptimizer) with the same rule, from a world of any
    /// size.
    fn prepare(&mut self, saved: Saved, rank: usize, _: usize) -> Result<PutInPlace<'_>> {
        check_named(self.named, SAVED)?;
        let loader = Loader::of(&saved, R::NAME, rank)?;
        Ok(Box::new(move || self.load_from(loader)))
    }
}

impl<R: UpdateRule> FusedOptimizer<R> {
    fn load_from(&mut self, mut loader: Loader) -> Result<()> {
        let learning_rates = loader.learning_rates("learning_rates", self.groups.len())?;
        let mut steps = Vec::new();
        let mut copies = Vec::new();
        for Group { options, slots } in &self.groups {
            for slot in slots {
                steps.push(loader.count(&slot.key("step"))?);
                let placement = Placement::whole(slot.var.shape());
                for (part, state) in options.states().iter().zip(&slot.states) {
                    // A copy, since the source may be this optimizer's own state.
                    let source = loader.part(&slot.key(part), &placement, state.dtype())?;
                    copies.push((state.clone(), source.to_device(state.device())?));
                }
            }
        }
        let is_torn = loader.has(TORN) && loader.count(TORN)? > 0;
        loader.finish()?;
        // Checks the learning rates before anything is changed.
        self.set_learning_rates(&learning_rates)?;
        for (state, source) in copies {
            state.slice_set(&source, 0, 0)?;
        }
        for (slot, steps) in self.groups.iter_mut().flat_map(|group| &mut group.slots).zip(steps) {
            slot.steps = steps;
        }
        self.is_torn = is_torn;
        Ok(())
    }
}
