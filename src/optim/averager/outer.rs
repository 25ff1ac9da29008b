//! DiLoCo's outer step: the averaged difference that local steps have made is the gradient of SGD.
use super::mean::{AVERAGER, average};
use crate::error::describe;
use crate::optim::ParamsSgd;
use crate::optim::rule::{UpdateRule, state_dtype};
use crate::process_group::ProcessGroup;
use crate::state::{self, Dict, Loader};
use crate::tensor::DTYPES;
use crate::tensor::finite::non_finite;
use crate::variables::{check_named, check_whole};
use crate::{Error, Result};
use candle_core::{DType, Tensor, Var};
use std::collections::BTreeMap;

/// The outer optimizer and its state, which is the same on all ranks. Nothing changes its tensors: each step makes new ones.
#[derive(Clone, Debug)]
pub(super) struct Outer {
    pub(super) options: ParamsSgd,
    /// The number of outer steps.
    steps: u64,
    /// By parameter; empty until the first averaging.
    slots: BTreeMap<String, Slot>,
    /// Whether the names of the parameters are the caller's.
    named: bool,
}

#[derive(Clone, Debug)]
struct Slot {
    /// The parameter after the last outer step, in f32 if the parameter has 16 bits: from it the local steps have begun.
    start: Tensor,
    /// The momentum.
    states: Vec<Tensor>,
}

const STEPS: &str = "outer_steps";
const START: &str = "start";

fn key(part: &str, parameter: &str) -> String {
    format!("{part}.{parameter}")
}

impl Outer {
    pub(super) fn new(options: ParamsSgd) -> Self {
        Self { options, steps: 0, slots: BTreeMap::new(), named: true }
    }

    /// Replaces the parameters by the result of an outer step, or at first by their mean. An error changes nothing.
    pub(super) fn step(&mut self, group: &ProcessGroup, parameters: &[(String, Var)], named: bool) -> Result<()> {
        check_whole(parameters.iter().map(|(name, var)| (name, var)), "average it without an outer optimizer")?;
        let begins = self.slots.is_empty();
        let starts = parameters.iter().map(|(name, var)| self.start(name, var)).collect::<Result<Vec<_>>>()?;
        if let Some(name) = self.slots.keys().find(|name| !parameters.iter().any(|(own, _)| own == *name)) {
            return Err(other(name, "the outer optimizer has it, but it is not given"));
        }
        let mut moved = Vec::with_capacity(parameters.len());
        for ((name, var), start) in parameters.iter().zip(&starts) {
            let local = var.as_detached_tensor().to_dtype(dtype_of(name, var)?)?;
            // From the start as the parameter had it: what rounding has taken from it is no movement.
            let moved_by = match start {
                Some(Slot { start, .. }) => (start.to_dtype(var.dtype())?.to_dtype(start.dtype())? - local)?,
                None => local,
            };
            moved.push((name.clone(), Var::from_tensor(&moved_by)?));
        }
        let own = first_non_finite(&moved)?;
        average(group, &moved)?;
        if first_non_finite(&moved)?.is_some() {
            return Err(group.note(diverged(group, &own)?));
        }
        let step = self.steps + u64::from(!begins);
        let mut slots = BTreeMap::new();
        for ((name, mean), start) in moved.iter().zip(starts) {
            let mean = mean.as_detached_tensor();
            let slot = match start {
                Some(Slot { start, mut states }) => {
                    Slot { start: self.options.update(&start, &mean, &mut states, step)?, states }
                }
                None => {
                    let states = self.options.states().iter().map(|_| mean.zeros_like());
                    Slot { states: states.collect::<candle_core::Result<_>>()?, start: mean }
                }
            };
            if slots.insert(name.clone(), slot).is_some() {
                let reason =
                    "two parameters have this name: build each model under a prefix, such as vb.pp(\"encoder\")";
                return Err(Error::parameter(name, reason));
            }
        }
        for (name, var) in parameters {
            var.set(&slots[name].start.to_dtype(var.dtype())?)?;
        }
        (self.steps, self.slots, self.named) = (step, slots, named);
        Ok(())
    }

    /// Where the local steps of a parameter have begun, on its device; None before the first averaging.
    fn start(&self, name: &str, var: &Var) -> Result<Option<Slot>> {
        if self.slots.is_empty() {
            return Ok(None);
        }
        let dtype = dtype_of(name, var)?;
        let Some(Slot { start, states }) = self.slots.get(name) else {
            return Err(other(name, "it is given, but the outer optimizer does not have it"));
        };
        if start.shape() != var.shape() || start.dtype() != dtype {
            let is = describe(start.dtype(), start.shape());
            return Err(other(
                name,
                &format!("the outer optimizer has it as {is}, but needs {}", describe(dtype, var.shape())),
            ));
        }
        let here = |tensor: &Tensor| tensor.to_device(var.device());
        let states = states.iter().map(here).collect::<candle_core::Result<_>>()?;
        Ok(Some(Slot { start: here(start)?, states }))
    }

    /// Adds its state to `dict`.
    pub(super) fn save(&self, dict: &mut Dict) -> Result<()> {
        check_named(self.named, "an outer optimizer to be saved")?;
        self.insert(dict)
    }

    fn insert(&self, dict: &mut Dict) -> Result<()> {
        dict.insert(STEPS.to_string(), state::count(self.steps)?);
        for (name, slot) in &self.slots {
            dict.insert(key(START, name), slot.start.clone());
            for (part, state) in self.options.states().iter().zip(&slot.states) {
                dict.insert(key(part, name), state.clone());
            }
        }
        Ok(())
    }

    /// The hashes of its state.
    pub(super) fn fingerprint(&self) -> Result<BTreeMap<String, u64>> {
        let mut dict = Dict::new();
        self.insert(&mut dict)?;
        state::fingerprint(&dict)
    }

    /// An outer optimizer with these options and the state of `loader`. That of an averager without one begins it anew.
    pub(super) fn load(options: &ParamsSgd, loader: &mut Loader) -> Result<Self> {
        let mut outer = Self::new(options.clone());
        if !loader.has(STEPS) {
            return Ok(outer);
        }
        outer.steps = loader.count(STEPS)?;
        let prefix = key(START, "");
        let names: Vec<_> = loader.keys().filter_map(|key| key.strip_prefix(&prefix)).map(str::to_string).collect();
        for name in names {
            let start = loader.tensor(&key(START, &name))?.detach();
            let mut states = Vec::new();
            for part in options.states() {
                let (key, state) = (key(part, &name), loader.tensor(&key(part, &name))?.detach());
                if state.shape() != start.shape() || state.dtype() != start.dtype() {
                    let needed = describe(start.dtype(), start.shape());
                    let is = describe(state.dtype(), state.shape());
                    return Err(Error::parameter(key, format!("it must be {needed}, as its start, but is {is}")));
                }
                states.push(state);
            }
            outer.slots.insert(name, Slot { start, states });
        }
        Ok(outer)
    }
}

/// The dtype of a parameter's start and momentum.
fn dtype_of(name: &str, var: &Var) -> Result<DType> {
    state_dtype(var.dtype()).ok_or_else(|| {
        let (dtype, supported) = (var.dtype(), DTYPES.map(|dtype| dtype.as_str()).join(", "));
        let reason =
            format!("its dtype must be one that the outer optimizer can update ({supported}), but is {dtype:?}");
        Error::parameter(name, reason)
    })
}

/// The error for parameters other than those with which the outer steps have begun.
fn other(name: &str, difference: &str) -> Error {
    let reason = format!(
        "{difference}: give average_parameters the same parameters in every call, and load the state that was saved with this model"
    );
    Error::parameter(name, reason)
}

fn first_non_finite(tensors: &[(String, Var)]) -> Result<Option<(String, String)>> {
    for (name, tensor) in tensors {
        if let Some(value) = non_finite(tensor)? {
            return Ok(Some((name.clone(), value.to_string())));
        }
    }
    Ok(None)
}

/// The error of an outer step that must not be made, the same on all ranks: asks them whose parameters are not finite.
fn diverged(group: &ProcessGroup, own: &Option<(String, String)>) -> Result<Error> {
    let found = AVERAGER.during(|| group.all_gather_object(own))?;
    let first = found.into_iter().enumerate().find_map(|(rank, found)| Some((rank, found?)));
    let (rank, parameter, value) = match first {
        Some((rank, (parameter, value))) => (Some(rank), Some(parameter), value),
        None => (None, None, "a NaN or an infinity".to_string()),
    };
    Ok(Error::NonFinite { parameter, rank, value, steps: 1 })
}
