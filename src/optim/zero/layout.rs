//! The parts of parameters that belong to this rank.
use crate::ddp::Shard;
use crate::optim::fused::state_dtype_of;
use crate::optim::parameters::ParameterGroup;
use crate::optim::rule::{self, UpdateRule};
use crate::placement::{Placement, Spread};
use crate::{Error, Result};
use candle_core::{Tensor, Var};
use std::collections::HashMap;
use std::ops::Range;

/// A parameter whose gradient DDP averages.
pub(super) struct Trained {
    pub(super) name: String,
    pub(super) var: Var,
    /// The variable's storage in one dimension.
    pub(super) flat: Tensor,
    pub(super) placement: Placement,
    /// The parameter group to which it belongs.
    pub(super) group: usize,
    pub(super) steps: u64,
}

/// A bucket, and the pieces of it that this rank updates.
pub(super) struct OwnShard {
    pub(super) shard: Shard,
    pub(super) pieces: Vec<Piece>,
}

/// This rank's part of one parameter, or all of a parameter that it owns.
pub(super) struct Piece {
    /// The parameter's number in registration order.
    pub(super) parameter: usize,
    pub(super) placement: Placement,
    /// Where the piece starts in this rank's part of the bucket.
    pub(super) offset: usize,
    /// A view of the variable: what it has of these elements.
    pub(super) values: Tensor,
    /// Empty if the rule needs the whole parameter: the state is then in that of [`Whole`](super::whole::Whole).
    pub(super) states: Vec<Tensor>,
}

/// The averaged parameters `all`, each of which must be in one of the groups, since no other optimizer gets its
/// gradient.
pub(super) fn trained<R: UpdateRule>(all: Vec<(String, Var)>, groups: &[ParameterGroup<R>]) -> Result<Vec<Trained>> {
    let mut group_of = HashMap::new();
    for (number, group) in groups.iter().enumerate() {
        rule::check(&group.options)?;
        for (name, var) in &group.parameters {
            if !all.iter().any(|(_, known)| known.id() == var.id()) {
                let reason = "DistributedDataParallel does not average its gradient: give it its own optimizer. If it is of another \
                              VarMap than the model, make the optimizer anew, and load its state with load_known";
                return Err(Error::parameter(name, reason));
            }
            state_dtype_of::<R>(name, var)?;
            if let Some(reason) = group.options.refuses(var) {
                return Err(Error::parameter(name, reason));
            }
            if group_of.insert(var.id(), number).is_some() {
                return Err(Error::parameter(name, "it is given twice, and would be updated twice"));
            }
        }
    }
    let trained = all.into_iter().map(|(name, var)| {
        let Some(group) = group_of.get(&var.id()).copied() else {
            let reason = "it is in no group, and no other optimizer gets its gradient: put it into one, or leave \
                          it to each rank with Role::Ignored";
            return Err(Error::parameter(name, reason));
        };
        let flat = var.as_detached_tensor().flatten_all()?;
        let placement = Placement::of(&var);
        Ok(Trained { name, var, flat, placement, group, steps: 0 })
    });
    trained.collect()
}

/// Whether `rule` updates pieces of parameters; another one needs whole parameters.
pub(super) fn takes_pieces<R: UpdateRule>(rule: &R) -> bool {
    R::ELEMENTWISE || rule.fused().is_some()
}

impl Piece {
    /// These elements of a parameter, with the initial state of `rule`, or without a state.
    pub(super) fn new<R: UpdateRule>(
        (parameter, trained): (usize, &Trained),
        (range, spread): (Range<usize>, Spread),
        offset: usize,
        rule: Option<&R>,
    ) -> Result<Self> {
        let Trained { name, var, flat, placement, .. } = trained;
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
        parameters: &[Trained],
        options: &[R],
    ) -> Result<Self> {
        let mut pieces = Vec::new();
        for (place, &parameter) in shard.parameters.iter().enumerate() {
            let (trained, range) = (&parameters[parameter], shard.cut.range(place, rank));
            if range.is_empty() {
                continue;
            }
            let rule = Some(&options[trained.group]).filter(|rule| takes_pieces(*rule));
            pieces.push(Piece::new((parameter, trained), (range, spread), shard.cut.offset(place, rank), rule)?);
        }
        Ok(Self { shard, pieces })
    }

    /// This rank's mean gradient of a piece, in the bucket's dtype.
    pub(super) fn gradient(&self, piece: &Piece) -> Result<Tensor> {
        Ok(self.shard.own.narrow(0, piece.offset, piece.values.elem_count())?)
    }
}
