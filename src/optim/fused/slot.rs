//! Parameters, and the parts of them that this rank updates.
use crate::ddp::Shard;
use crate::ddp::gradients::steps::Steps;
use crate::kernels;
use crate::optim::parameters::ParameterGroup;
use crate::optim::rule::{self, UpdateRule, state_dtype};
use crate::placement::{Placement, Spread};
use crate::tensor::DTYPES;
use crate::variables::check_whole;
use crate::{Error, Result};
use candle_core::{DType, Tensor, TensorId, Var};
use std::collections::{HashMap, HashSet};
use std::ops::Range;

/// A parameter.
pub(super) struct Slot {
    pub(super) name: String,
    pub(super) var: Var,
    /// The variable's storage in one dimension.
    pub(super) flat: Tensor,
    pub(super) placement: Placement,
    /// The parameter group to which it belongs.
    pub(super) group: usize,
    pub(super) steps: u64,
}

/// Elements of a parameter that this rank updates, with their state.
pub(super) struct Piece {
    /// The number of its slot.
    pub(super) parameter: usize,
    pub(super) placement: Placement,
    /// The offset of the piece in this rank's part of the bucket; 0 for a whole parameter.
    pub(super) offset: usize,
    /// A view of the variable: what it has of these elements.
    pub(super) values: Tensor,
    /// One-dimensional, each with its own storage. Empty if the rule needs the whole parameter: the state is then in the slot of
    /// [`Whole`](super::whole::Whole).
    pub(super) states: Vec<Tensor>,
}

/// A bucket, and the pieces of it that this rank updates.
pub(super) struct OwnShard {
    pub(super) shard: Shard,
    pub(super) pieces: Vec<Piece>,
}

/// The entry of a parameter's state in a state dict.
pub(super) fn key(parameter: &str, part: &str) -> String {
    format!("state.{parameter}.{part}")
}

/// The number of steps, if the next one depends on it.
pub(super) fn number<R: UpdateRule>(options: &R, steps: u64) -> Option<u64> {
    (!options.states().is_empty()).then_some(steps)
}

/// Whether `rule` updates pieces of parameters; another one needs whole parameters.
pub(super) fn takes_pieces<R: UpdateRule>(rule: &R) -> bool {
    R::ELEMENTWISE || rule.fused().is_some()
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

/// The options and the parameters of `groups`, which follow the `known` parameters of `first` other groups.
pub(super) fn slots<R: UpdateRule>(
    groups: Vec<ParameterGroup<R>>,
    known: &[Slot],
    first: usize,
) -> Result<(Vec<R>, Vec<Slot>)> {
    let mut names: HashSet<String> = known.iter().map(|slot| slot.name.clone()).collect();
    let mut variables: HashSet<TensorId> = known.iter().map(|slot| slot.var.id()).collect();
    let (mut all, mut slots) = (Vec::with_capacity(groups.len()), Vec::new());
    for ParameterGroup { parameters, options } in groups {
        rule::check(&options)?;
        for (name, var) in parameters {
            if !names.insert(name.clone()) {
                let reason = "two parameters have this name: build each model under a prefix, such as vb.pp(\"encoder\"), \
                              or make an optimizer for each";
                return Err(Error::parameter(name, reason));
            }
            if !variables.insert(var.id()) {
                return Err(Error::parameter(name, "its variable is given twice, and would be updated twice"));
            }
            if let Some(reason) = options.refuses(&var) {
                return Err(Error::parameter(name, reason));
            }
            if var.dtype().is_float() {
                state_dtype_of::<R>(&name, &var)?;
                let (flat, placement) = (var.as_detached_tensor().flatten_all()?, Placement::of(&var));
                slots.push(Slot { name, var, flat, placement, group: first + all.len(), steps: 0 });
            }
        }
        all.push(options);
    }
    Ok((all, slots))
}

/// Puts the parameters of the sharded `model` first, in its order. There must be all of them, since no other optimizer gets their gradients.
/// Returns how many they are.
pub(super) fn of_model_first(slots: &mut [Slot], model: Option<&Steps>) -> Result<usize> {
    let averaged: Vec<_> = model.iter().flat_map(|model| model.averaged()).collect();
    let places: HashMap<_, _> = averaged.iter().enumerate().map(|(place, (_, var))| (var.id(), place)).collect();
    slots.sort_by_key(|slot| places.get(&slot.var.id()).copied().unwrap_or(usize::MAX));
    for (place, (name, var)) in averaged.iter().enumerate() {
        if slots.get(place).is_none_or(|slot| slot.var.id() != var.id()) {
            let reason = "it is in no group, and no other optimizer gets its gradient: put it into one, or leave \
                          it to each rank with Role::Ignored";
            return Err(Error::parameter(*name, reason));
        }
    }
    for slot in &slots[averaged.len()..] {
        if Steps::sharded([&slot.var]).is_some() {
            let reason = "it is of another sharded model than other parameters: make an optimizer for each model, and drop models that \
                          were replaced";
            return Err(Error::parameter(&slot.name, reason));
        }
        check_whole([(&slot.name, &slot.var)], "make the optimizer while the model exists")?;
    }
    Ok(averaged.len())
}

impl Piece {
    /// All of a parameter that this rank updates by itself.
    pub(super) fn whole<R: UpdateRule>((parameter, slot): (usize, &Slot), rule: &R) -> Result<Self> {
        let Placement { range, spread, .. } = slot.placement.clone();
        Self::new((parameter, slot), (range, spread), 0, Some(rule))
    }

    /// These elements of a parameter, with the initial state of `rule`, or without a state.
    pub(super) fn new<R: UpdateRule>(
        (parameter, slot): (usize, &Slot),
        (range, spread): (Range<usize>, Spread),
        offset: usize,
        rule: Option<&R>,
    ) -> Result<Self> {
        let Slot { name, var, flat, placement, .. } = slot;
        let dtype = state_dtype_of::<R>(name, var)?;
        let names = rule.map_or(&[][..], R::states);
        let states = names.iter().map(|_| Tensor::zeros(range.len(), dtype, flat.device()));
        let states = states.collect::<candle_core::Result<_>>()?;
        let here = &placement.range;
        let (start, end) = (range.start.clamp(here.start, here.end), range.end.clamp(here.start, here.end));
        let values = flat.narrow(0, start - here.start, end - start)?;
        let placement = Placement { shape: placement.shape.clone(), range, spread };
        Ok(Self { parameter, placement, offset, values, states })
    }
}

impl OwnShard {
    pub(super) fn new<R: UpdateRule>(
        shard: Shard,
        (rank, spread): (usize, Spread),
        slots: &[Slot],
        options: &[R],
    ) -> Result<Self> {
        let mut pieces = Vec::new();
        for (place, &parameter) in shard.parameters.iter().enumerate() {
            let (slot, range) = (&slots[parameter], shard.cut.range(place, rank));
            if range.is_empty() {
                continue;
            }
            let rule = Some(&options[slot.group]).filter(|rule| takes_pieces(*rule));
            pieces.push(Piece::new((parameter, slot), (range, spread), shard.cut.offset(place, rank), rule)?);
        }
        Ok(Self { shard, pieces })
    }

    /// This rank's mean gradient of a piece, in the bucket's dtype.
    pub(super) fn gradient(&self, piece: &Piece) -> Result<Tensor> {
        Ok(self.shard.own.narrow(0, piece.offset, piece.values.elem_count())?)
    }
}
