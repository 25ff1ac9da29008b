//! The optimizer around an update rule: parameters, groups, counters and state.
use super::clip;
use super::optimizer::{Optimizer, check_learning_rates};
use super::rule::{Moment, UpdateRule, limit};
use super::update::{self, Part};
use crate::error::describe;
use crate::kernels;
use crate::state::{self, Loader, StateDict};
use crate::tensor::DTYPES;
use crate::{Error, Result};
use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, Var};
use std::collections::{HashMap, HashSet};

/// Parameters that are trained with the same options.
#[derive(Clone, Debug)]
pub struct ParameterGroup<R> {
    /// The parameters with their names.
    pub parameters: Vec<(String, Var)>,
    /// Their options.
    pub options: R,
}

/// An optimizer that reads parameter, gradient and state in one pass: [`AdamW`](super::AdamW), [`Adam`](super::Adam),
/// [`Sgd`](super::Sgd) and [`Lamb`](super::Lamb).
///
/// Parameters may be f32, f64, f16 or bf16. 16-bit parameters are updated in f32 arithmetic and have f32 state.
/// Variables of integer type are left alone. As in PyTorch, a step does not change parameters without a gradient, nor
/// their state.
///
/// On a GPU all parameters of a dtype are updated together, with as many kernel launches as a single parameter needs:
/// one, or three for LAMB, which also waits once for the norm of the gradients if `max_grad_norm` is set.
///
/// An optimizer made with [`from_named`](Self::from_named) or [`from_groups`](Self::from_groups) can be saved. It
/// implements [`Optimizer`] and also candle's trait of that name, whose [`new`](candle_nn::Optimizer::new) takes
/// variables without names.
#[derive(Debug)]
pub struct FusedOptimizer<R> {
    groups: Vec<Group<R>>,
    named: bool,
}

#[derive(Debug)]
struct Group<R> {
    options: R,
    slots: Vec<Slot>,
}

/// A parameter and its state.
#[derive(Debug)]
struct Slot {
    name: String,
    var: Var,
    /// The variable's storage in one dimension.
    flat: Tensor,
    /// One-dimensional, each with its own storage.
    states: Vec<Tensor>,
    steps: u64,
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
    fn gradient(&self, grads: &GradStore) -> Result<Option<Tensor>> {
        let Some(gradient) = grads.get(&self.var) else { return Ok(None) };
        if gradient.shape() != self.var.shape() || !gradient.device().same_device(self.var.device()) {
            let is = describe(gradient.dtype(), gradient.shape());
            let needed = describe(self.var.dtype(), self.var.shape());
            let (at, belongs) = (gradient.device().location(), self.var.device().location());
            let reason = format!("its gradient is {is} on {at:?}, but {needed} on {belongs:?} is needed");
            return Err(Error::parameter(&self.name, reason));
        }
        Ok(Some(gradient.detach().to_dtype(self.var.dtype())?.contiguous()?.flatten_all()?))
    }

    /// The name of a part of its state in a state dict.
    fn key(&self, part: &str) -> String {
        format!("state.{}.{part}", self.name)
    }
}

/// The dtype of arithmetic and state for parameters of `dtype`; None if there is no kernel for it.
pub(super) fn state_dtype(dtype: DType) -> Option<DType> {
    match dtype {
        DType::F64 => Some(DType::F64),
        DType::F32 | DType::F16 | DType::BF16 => Some(DType::F32),
        _ => None,
    }
}

/// The dtype of `R`'s state for a parameter, if `R` can update it.
pub(super) fn state_dtype_of<R: UpdateRule>(name: &str, var: &Var) -> Result<DType> {
    let Some(dtype) = state_dtype(var.dtype()) else {
        let (dtype, supported) = (var.dtype(), DTYPES.map(|dtype| dtype.as_str()).join(", "));
        let reason = format!("{} has no kernel for {dtype:?} (supported: {supported})", R::NAME);
        return Err(Error::parameter(name, reason));
    };
    if !var.device().is_cpu() && !kernels::take(var.device(), var.dtype()) {
        let reason = format!("{} has no kernel for {:?}", R::NAME, var.device().location());
        return Err(Error::parameter(name, reason));
    }
    if !var.is_contiguous() {
        let reason = "its variable is not contiguous: make it from a contiguous tensor";
        return Err(Error::parameter(name, reason));
    }
    Ok(dtype)
}

impl<R: UpdateRule> FusedOptimizer<R> {
    /// An optimizer for parameters with names, such as those of
    /// [`named_parameters`](crate::DistributedDataParallel::named_parameters).
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for invalid options; [`Error::Parameter`] for a parameter that is given
    /// twice, has a dtype without a kernel, or is not contiguous.
    pub fn from_named(parameters: Vec<(String, Var)>, options: R) -> Result<Self> {
        Self::from_groups(vec![ParameterGroup { parameters, options }])
    }

    /// An optimizer with separate options for each group of parameters.
    ///
    /// # Errors
    /// Returns the errors of [`from_named`](Self::from_named).
    pub fn from_groups(groups: Vec<ParameterGroup<R>>) -> Result<Self> {
        let (mut names, mut variables) = (HashSet::new(), HashSet::new());
        let mut built = Vec::with_capacity(groups.len());
        for ParameterGroup { parameters, options } in groups {
            options.check()?;
            let mut slots = Vec::with_capacity(parameters.len());
            for (name, var) in parameters {
                if !names.insert(name.clone()) {
                    return Err(Error::parameter(name, "two parameters have this name"));
                }
                if !variables.insert(var.id()) {
                    return Err(Error::parameter(name, "its variable is given twice, and would be updated twice"));
                }
                if var.dtype().is_float() {
                    slots.push(Slot::new(name, var, &options)?);
                }
            }
            built.push(Group { options, slots });
        }
        Ok(Self { groups: built, named: true })
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
        options.check()?;
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

    fn slots(&self) -> impl Iterator<Item = &Slot> {
        self.groups.iter().flat_map(|group| &group.slots)
    }

    fn apply(&mut self, grads: &GradStore) -> Result<()> {
        // Check everything before changing anything.
        let gradients: Vec<Vec<Option<Tensor>>> = self
            .groups
            .iter()
            .map(|group| group.slots.iter().map(|slot| slot.gradient(grads)).collect())
            .collect::<Result<_>>()?;
        let norm = if self.options().any(|options| options.max_grad_norm().is_some()) {
            clip::norm(gradients.iter().flatten().flatten(), clip::NormType::L2)?
        } else {
            0.
        };
        let mut parts = Vec::new();
        for (Group { options, slots }, gradients) in self.groups.iter().zip(&gradients) {
            let gradient_scale = limit(options, norm);
            for (slot, gradient) in slots.iter().zip(gradients) {
                let Some(gradient) = gradient.clone() else { continue };
                let moment = Moment { step: slot.steps + 1, gradient_scale };
                parts.push(Part { rule: options, moment, parameter: &slot.flat, gradient, states: &slot.states });
            }
        }
        update::update_whole(&parts)?;
        let slots = self.groups.iter_mut().flat_map(|group| &mut group.slots);
        for (slot, gradient) in slots.zip(gradients.iter().flatten()) {
            slot.steps += u64::from(gradient.is_some());
        }
        Ok(())
    }
}

impl<R: UpdateRule> Optimizer for FusedOptimizer<R> {
    fn step(&mut self, grads: &GradStore) -> Result<()> {
        self.apply(grads)
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
        clip::clip_grad_norm(grads, &vars, max_norm)
    }
}

/// Implements candle's trait.
impl<R: UpdateRule> candle_nn::Optimizer for FusedOptimizer<R> {
    type Config = R;

    /// An optimizer for variables without names. It cannot be saved, and error messages refer to variables by index.
    fn new(vars: Vec<Var>, options: R) -> candle_core::Result<Self> {
        let parameters = vars.into_iter().enumerate().map(|(index, var)| (format!("#{index}"), var)).collect();
        Ok(Self { named: false, ..Self::from_named(parameters, options)? })
    }

    /// Updates every parameter that has a gradient.
    fn step(&mut self, grads: &GradStore) -> candle_core::Result<()> {
        Ok(self.apply(grads)?)
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
        self.check_named()?;
        let mut dict = state::begin(R::NAME)?;
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
        self.check_named()?;
        let mut loader = Loader::new(dict, R::NAME)?;
        let learning_rates = loader.learning_rates("learning_rates", self.groups.len())?;
        let mut steps = Vec::new();
        let mut copies = Vec::new();
        for Group { options, slots } in &self.groups {
            for slot in slots {
                steps.push(loader.count(&slot.key("step"))?);
                for (part, state) in options.states().iter().zip(&slot.states) {
                    // A copy, since the source may be this optimizer's own state.
                    let source = loader.like(&slot.key(part), slot.var.shape(), state.dtype())?;
                    copies.push((state.clone(), source.to_device(state.device())?.copy()?.flatten_all()?));
                }
            }
        }
        loader.finish()?;
        // Checks the learning rates before anything is changed.
        self.set_learning_rates(&learning_rates)?;
        for (state, source) in copies {
            state.slice_set(&source, 0, 0)?;
        }
        for (slot, steps) in self.groups.iter_mut().flat_map(|group| &mut group.slots).zip(steps) {
            slot.steps = steps;
        }
        Ok(())
    }
}

impl<R> FusedOptimizer<R> {
    fn check_named(&self) -> Result<()> {
        if self.named {
            return Ok(());
        }
        let reason = "an optimizer made without names cannot be saved or loaded, since the order of a VarMap's variables \
                      differs from run to run: make it with from_named(ddp.named_parameters(), options)";
        Err(Error::invalid("parameters", reason))
    }
}
