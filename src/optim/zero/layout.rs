//! The parts of parameters that belong to this rank.
use crate::ddp::Shard;
use crate::optim::fused::state_dtype_of;
use crate::optim::parameters::ParameterGroup;
use crate::optim::rule::{self, UpdateRule};
use crate::{Error, Result};
use candle_core::{DType, Tensor, Var};
use std::collections::HashMap;

/// A parameter whose gradient DDP averages.
pub(super) struct Trained {
    pub(super) name: String,
    pub(super) var: Var,
    /// The variable's storage in one dimension.
    pub(super) flat: Tensor,
    /// The parameter group to which it belongs.
    pub(super) group: usize,
    pub(super) steps: u64,
}

/// A bucket, and the pieces of it that this rank updates.
pub(super) struct OwnShard {
    pub(super) shard: Shard,
    pub(super) pieces: Vec<Piece>,
}

/// This rank's part of one parameter.
pub(super) struct Piece {
    /// The parameter's number in registration order.
    pub(super) parameter: usize,
    /// Where the piece starts in the parameter.
    pub(super) start: usize,
    /// Where the piece starts in this rank's part of the bucket.
    pub(super) offset: usize,
    pub(super) elements: usize,
    /// A view of the variable.
    pub(super) values: Tensor,
    pub(super) states: Vec<Tensor>,
}

/// The averaged parameters `all`, each of which must be in one of the groups, since no other optimizer gets its
/// gradient.
pub(super) fn trained<R: UpdateRule>(all: Vec<(String, Var)>, groups: &[ParameterGroup<R>]) -> Result<Vec<Trained>> {
    let mut group_of = HashMap::new();
    for (number, group) in groups.iter().enumerate() {
        rule::check(&group.options)?;
        check_pieces(&group.options)?;
        for (name, var) in &group.parameters {
            if !all.iter().any(|(_, known)| known.id() == var.id()) {
                let reason = "DistributedDataParallel does not average its gradient: give it its own optimizer";
                return Err(Error::parameter(name, reason));
            }
            state_dtype_of::<R>(name, var)?;
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
        Ok(Trained { name, var, flat, group, steps: 0 })
    });
    trained.collect()
}

/// Refuses rules that need whole parameters.
fn check_pieces<R: UpdateRule>(rule: &R) -> Result<()> {
    if R::ELEMENTWISE || rule.fused().is_some() {
        return Ok(());
    }
    let reason = format!(
        "{name} must be an element-wise rule, since each rank updates pieces of parameters: set \
         UpdateRule::ELEMENTWISE if it is, or use FusedOptimizer<{name}>",
        name = R::NAME
    );
    Err(Error::invalid("options", reason))
}

impl OwnShard {
    pub(super) fn new<R: UpdateRule>(shard: Shard, rank: usize, parameters: &[Trained], options: &[R]) -> Result<Self> {
        let length = shard.own.elem_count();
        let mut pieces = Vec::new();
        for member in &shard.members {
            let Trained { name, var, flat, group, .. } = &parameters[member.parameter];
            let from = (rank * length).max(member.offset);
            let to = ((rank + 1) * length).min(member.offset + member.elements);
            if from >= to {
                continue;
            }
            let (start, elements) = (from - member.offset, to - from);
            let values = flat.narrow(0, start, elements)?;
            let states = zeros(&options[*group], elements, state_dtype_of::<R>(name, var)?, flat)?;
            let (parameter, offset) = (member.parameter, from - rank * length);
            pieces.push(Piece { parameter, start, offset, elements, values, states });
        }
        Ok(Self { shard, pieces })
    }

    /// This rank's mean gradient of a piece, in the bucket's dtype.
    pub(super) fn gradient(&self, piece: &Piece) -> Result<Tensor> {
        Ok(self.shard.own.narrow(0, piece.offset, piece.elements)?)
    }
}

/// The initial state of `rule` for a parameter of `dtype`.
pub(super) fn zeros<R: UpdateRule>(rule: &R, elements: usize, dtype: DType, like: &Tensor) -> Result<Vec<Tensor>> {
    let zeros = rule.states().iter().map(|_| Tensor::zeros(elements, dtype, like.device()));
    Ok(zeros.collect::<candle_core::Result<_>>()?)
}
