//! DiLoCo's outer step: the averaged difference that local steps have made is the gradient of SGD.
use super::mean::{AVERAGER, Means};
use crate::error::describe;
use crate::optim::ParamsSgd;
use crate::optim::rule::{UpdateRule, state_dtype};
use crate::process_group::ProcessGroup;
use crate::state::{self, Dict, Loader};
use crate::tensor::DTYPES;
use crate::tensor::finite::non_finite;
use crate::variables::check_named;
use crate::{Error, Result};
use candle_core::{DType, Tensor, Var};
use std::collections::BTreeMap;
use std::ops::Range;

/// The outer optimizer and its state, which is the same on all ranks. Nothing changes its tensors: each step makes new ones.
#[derive(Clone, Debug)]
pub(super) struct Outer {
    pub(super) options: ParamsSgd,
    pub(super) streaming: Streaming,
    /// The number of outer steps, each of a fragment. The fragments take turns.
    steps: u64,
    /// By parameter; empty until the first averaging.
    slots: BTreeMap<String, Slot>,
    flight: Option<Flight>,
    /// Whether the names of the parameters are the caller's.
    named: bool,
}

/// How the parameters are divided, and when and how the result of an outer step gets into them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Streaming {
    pub(super) fragments: u64,
    /// The number of local steps during the all-reduce.
    pub(super) delay: u64,
    /// The share of the local parameters in the result.
    pub(super) alpha: f64,
}

#[derive(Clone, Debug)]
struct Slot {
    /// The parameter after the last outer step, in f32 if the parameter has 16 bits: from it the local steps have begun.
    start: Tensor,
    /// The momentum.
    states: Vec<Tensor>,
}

/// A fragment whose movement is being averaged.
#[derive(Clone, Debug)]
struct Flight {
    /// The distance that each parameter has moved, sorted by name: this rank's, and the mean once `means` are finished.
    moved: Vec<(String, Var)>,
    /// None for a flight from a checkpoint, which holds the mean.
    means: Option<Means>,
    /// The first parameter on this rank that is not finite, with the value.
    non_finite: Option<(String, String)>,
}

const STEPS: &str = "outer_steps";
const FRAGMENTS: &str = "fragments";
const START: &str = "start";
const MOVED: &str = "moved";

fn key(part: &str, parameter: &str) -> String {
    format!("{part}.{parameter}")
}

impl Outer {
    pub(super) fn new(options: ParamsSgd) -> Self {
        let streaming = Streaming { fragments: 1, delay: 0, alpha: 0. };
        Self { options, streaming, steps: 0, slots: BTreeMap::new(), flight: None, named: true }
    }

    /// Divides the parameters like this from now on. It begins with the first fragment, and a round that has begun counts as whole: no
    /// parameter has its first update twice.
    pub(super) fn set_streaming(&mut self, streaming: Streaming) {
        if streaming.fragments != self.streaming.fragments {
            self.steps = self.steps.div_ceil(self.streaming.fragments).saturating_mul(streaming.fragments);
        }
        self.streaming = streaming;
    }

    /// Whether a fragment in flight has to arrive `phase` steps after a fragment was due.
    pub(super) fn arrives(&self, phase: u64) -> bool {
        self.flight.is_some() && (phase >= self.streaming.delay || phase == 0)
    }

    /// Sends the next fragment off if `phase`, the number of steps since a fragment was due, is 0, and lets the one in flight arrive if
    /// it is time. The first averaging gives all parameters their mean. Parameters are sorted by name. Returns whether they
    /// have changed. An error changes nothing, except that no fragment is in flight then: it has its turn again.
    pub(super) fn step(
        &mut self,
        group: &ProcessGroup,
        parameters: &[(String, Var)],
        named: bool,
        phase: u64,
    ) -> Result<bool> {
        self.check(parameters)?;
        if self.slots.is_empty() {
            let all = self.send(group, parameters)?;
            self.arrive(group, parameters, all)?;
            self.named = named;
            return Ok(true);
        }
        let mut arrived = false;
        if self.arrives(phase)
            && let Some(flight) = self.flight.take()
        {
            self.arrive(group, parameters, flight)?;
            arrived = true;
        }
        if phase == 0 {
            let Streaming { fragments, delay, .. } = self.streaming;
            let sizes: Vec<_> = parameters.iter().map(|(_, var)| var.elem_count()).collect();
            let fragment = fragment(&sizes, self.steps % fragments, fragments);
            let flight = self.send(group, &parameters[fragment])?;
            if delay == 0 {
                self.arrive(group, parameters, flight)?;
                arrived = true;
            } else {
                self.flight = Some(flight);
            }
        }
        self.named = named;
        Ok(arrived)
    }

    /// Refuses parameters that cannot be averaged, and others than those with which the outer steps have begun.
    fn check(&self, parameters: &[(String, Var)]) -> Result<()> {
        if let Some(pair) = parameters.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            let reason = "two parameters have this name: build each model under a prefix, such as vb.pp(\"encoder\")";
            return Err(Error::parameter(&pair[0].0, reason));
        }
        for (name, var) in parameters {
            let dtype = dtype_of(name, var)?;
            match self.slots.get(name) {
                Some(Slot { start, .. }) if start.shape() != var.shape() || start.dtype() != dtype => {
                    let (is, needed) = (describe(start.dtype(), start.shape()), describe(dtype, var.shape()));
                    return Err(other(name, &format!("the outer optimizer has it as {is}, but needs {needed}")));
                }
                None if !self.slots.is_empty() => {
                    return Err(other(name, "it is given, but the outer optimizer does not have it"));
                }
                _ => {}
            }
        }
        let is_given = |name: &String| parameters.binary_search_by(|(own, _)| own.cmp(name)).is_ok();
        if let Some(name) = self.slots.keys().find(|name| !is_given(name)) {
            return Err(other(name, "the outer optimizer has it, but it is not given"));
        }
        let (fragments, parameters) = (self.streaming.fragments, parameters.len() as u64);
        if fragments > parameters.max(1) {
            let reason = format!(
                "it must be at most {parameters}, the number of parameters, since each of these is in one fragment, but is {fragments}"
            );
            return Err(Error::invalid("fragments", reason));
        }
        Ok(())
    }

    /// Begins to average the movements of a fragment, or at first the parameters.
    fn send(&self, group: &ProcessGroup, fragment: &[(String, Var)]) -> Result<Flight> {
        let mut moved = Vec::with_capacity(fragment.len());
        for (name, var) in fragment {
            let local = var.as_detached_tensor().to_dtype(dtype_of(name, var)?)?;
            // From the start as the parameter had it: what rounding has taken from it is no movement.
            let moved_by = match self.slots.get(name) {
                Some(Slot { start, .. }) => {
                    let start = start.to_device(var.device())?;
                    (start.to_dtype(var.dtype())?.to_dtype(start.dtype())? - local)?
                }
                None => local,
            };
            moved.push((name.clone(), Var::from_tensor(&moved_by)?));
        }
        let non_finite = first_non_finite(&moved)?;
        let means = Some(Means::begin(group, &moved)?);
        Ok(Flight { moved, means, non_finite })
    }

    /// Makes the outer step of a fragment, or gives all parameters their mean if this is the first averaging.
    fn arrive(&mut self, group: &ProcessGroup, parameters: &[(String, Var)], flight: Flight) -> Result<()> {
        let Flight { moved, means, non_finite } = &flight;
        means.iter().try_for_each(Means::finish)?;
        if first_non_finite(moved)?.is_some() {
            return Err(group.note(diverged(group, non_finite)?));
        }
        let begins = self.slots.is_empty();
        let Streaming { fragments, alpha, .. } = self.streaming;
        let number = self.steps / fragments + 1;
        let mut updates = Vec::with_capacity(moved.len());
        for (name, mean) in moved {
            let Ok(index) = parameters.binary_search_by(|(own, _)| own.cmp(name)) else {
                return Err(other(name, "it is in flight, but not given"));
            };
            let var = &parameters[index].1;
            let here = |tensor: &Tensor| tensor.to_device(var.device());
            let mean = here(&mean.as_detached_tensor())?;
            let slot = match self.slots.get(name) {
                Some(Slot { start, states }) => {
                    let mut states = states.iter().map(here).collect::<candle_core::Result<Vec<_>>>()?;
                    Slot { start: self.options.update(&here(start)?, &mean, &mut states, number)?, states }
                }
                None => {
                    let states = self.options.states().iter().map(|_| mean.zeros_like());
                    Slot { states: states.collect::<candle_core::Result<_>>()?, start: mean }
                }
            };
            let mut value = slot.start.clone();
            if alpha > 0. && !begins {
                let local = var.as_detached_tensor().to_dtype(value.dtype())?;
                value = (&value + ((local - &value)? * alpha)?)?;
            }
            updates.push((var, value.to_dtype(var.dtype())?, name.clone(), slot));
        }
        updates.iter().try_for_each(|(var, value, ..)| var.set(value))?;
        self.slots.extend(updates.into_iter().map(|(_, _, name, slot)| (name, slot)));
        self.steps += u64::from(!begins);
        Ok(())
    }

    /// Adds its state to `dict`.
    pub(super) fn save(&self, dict: &mut Dict) -> Result<()> {
        check_named(self.named, "an outer optimizer to be saved")?;
        self.insert(dict)
    }

    fn insert(&self, dict: &mut Dict) -> Result<()> {
        dict.insert(STEPS.to_string(), state::count(self.steps)?);
        if self.streaming.fragments > 1 {
            dict.insert(FRAGMENTS.to_string(), state::count(self.streaming.fragments)?);
        }
        for (name, slot) in &self.slots {
            dict.insert(key(START, name), slot.start.clone());
            for (part, state) in self.options.states().iter().zip(&slot.states) {
                dict.insert(key(part, name), state.clone());
            }
        }
        if let Some(Flight { moved, means, .. }) = &self.flight {
            means.iter().try_for_each(Means::finish)?;
            dict.extend(moved.iter().map(|(name, mean)| (key(MOVED, name), mean.as_detached_tensor())));
        }
        Ok(())
    }

    /// The hashes of its state.
    pub(super) fn fingerprint(&self) -> Result<BTreeMap<String, u64>> {
        let mut dict = Dict::new();
        self.insert(&mut dict)?;
        state::fingerprint(&dict)
    }

    /// An outer optimizer with the options of this one and the state of `loader`. That of an averager without one begins it anew.
    pub(super) fn load(&self, loader: &mut Loader) -> Result<Self> {
        let mut outer = Self::new(self.options.clone());
        if loader.has(STEPS) {
            outer.steps = loader.count(STEPS)?;
            if loader.has(FRAGMENTS) {
                outer.streaming.fragments = loader.count(FRAGMENTS)?;
            }
            if outer.streaming.fragments == 0 {
                return Err(Error::parameter(FRAGMENTS, "it must be at least 1, but is 0"));
            }
            outer.load_parameters(loader)?;
        }
        outer.set_streaming(self.streaming);
        Ok(outer)
    }

    fn load_parameters(&mut self, loader: &mut Loader) -> Result<()> {
        let mut names = [START, MOVED].map(|part| {
            let prefix = key(part, "");
            let names = loader.keys().filter_map(|key| key.strip_prefix(&prefix)).map(str::to_string);
            names.collect::<Vec<_>>()
        });
        names[1].sort();
        let [starts, moved] = names;
        for name in starts {
            let start = loader.tensor(&key(START, &name))?.detach();
            let states = self.options.states().iter().map(|part| like(loader, part, &name, &start));
            let states = states.collect::<Result<_>>()?;
            self.slots.insert(name, Slot { start, states });
        }
        if !moved.is_empty() {
            let load = |name: String| {
                // Without the start of a parameter its movement is of no use: loading names it as missing.
                let start = loader.tensor(&key(START, &name))?;
                let mean = Var::from_tensor(&like(loader, MOVED, &name, &start)?)?;
                Ok((name, mean))
            };
            let moved = moved.into_iter().map(load).collect::<Result<_>>()?;
            self.flight = Some(Flight { moved, means: None, non_finite: None });
        }
        Ok(())
    }
}

/// The fragment with this number, as a range of the parameters, which have these sizes and are at least as many as fragments. Fragments
/// are about equal in elements, and none is empty.
fn fragment(sizes: &[usize], number: u64, fragments: u64) -> Range<usize> {
    let mut range = 0..0;
    let mut left: u128 = sizes.iter().map(|size| *size as u128).sum();
    for remaining in (fragments - number..=fragments).rev().map(u128::from) {
        let (mut end, mut taken) = (range.end, 0);
        // A parameter belongs to it if at least half of it lies within an equal share of what is left.
        while end as u128 + remaining <= sizes.len() as u128 {
            let size = sizes[end] as u128;
            if taken > 0 && (2 * taken + size) * remaining > 2 * left {
                break;
            }
            (end, taken) = (end + 1, taken + size);
        }
        (range, left) = (range.end..end, left - taken);
    }
    range
}

/// A tensor of a state that belongs to a start.
fn like(loader: &mut Loader, part: &str, name: &str, start: &Tensor) -> Result<Tensor> {
    let key = key(part, name);
    let tensor = loader.tensor(&key)?.detach();
    if tensor.shape() != start.shape() || tensor.dtype() != start.dtype() {
        let (is, needed) = (describe(tensor.dtype(), tensor.shape()), describe(start.dtype(), start.shape()));
        return Err(Error::parameter(key, format!("it must be {needed}, as its start, but is {is}")));
    }
    Ok(tensor)
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
