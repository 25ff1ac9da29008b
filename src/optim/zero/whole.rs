//! Parameters that their rule updates only as a whole. Each belongs to one rank, its owner, which has the state. At a step, the owner
//! gets the parts of the gradient from the other ranks, and sends them their parts of the new value.
use super::ZeroRedundancyOptimizer;
use super::layout::{self, OwnShard, Piece, Trained};
use crate::Result;
use crate::backend::P2pOp;
use crate::ddp::Member;
use crate::optim::kernel::Sums;
use crate::optim::rule::UpdateRule;
use crate::optim::update;
use crate::process_group::ProcessGroup;
use crate::tensor::copy;
use candle_core::Tensor;
use std::cmp::Reverse;
use std::ops::Range;

/// A parameter that its owner updates.
pub(super) struct Whole {
    pub(super) parameter: usize,
    owner: usize,
    /// The number of its shard.
    shard: usize,
    /// The elements of it that are in each rank's part of the bucket.
    ranges: Vec<Range<usize>>,
    /// All of it, on its owner.
    pub(super) own: Option<Piece>,
}

/// A flat tensor that its owner has as a whole, and of which each rank has a part; None on ranks that have none.
struct Moved<'a> {
    whole: &'a Whole,
    tensor: Option<Tensor>,
    part: Option<Tensor>,
}

#[derive(Clone, Copy)]
enum Way {
    ToOwners,
    FromOwners,
}

/// The parameters that their rules need as a whole, the largest first. Each belongs to the rank that has the fewest elements so far.
pub(super) fn wholes<R: UpdateRule>(
    shards: &[OwnShard],
    parameters: &[Trained],
    options: &[R],
    process_group: &ProcessGroup,
) -> Result<Vec<Whole>> {
    let rule = |member: &Member| &options[parameters[member.parameter].group];
    let members = shards.iter().enumerate();
    let members = members.flat_map(|(number, own)| own.shard.members.iter().map(move |member| (number, member)));
    let mut members: Vec<_> = members.filter(|(_, member)| !layout::takes_pieces(rule(member))).collect();
    // The owners do not depend on the order of the buckets.
    members.sort_by_key(|(_, member)| (Reverse(member.elements), member.parameter));
    let mut loads = vec![0; process_group.world_size()];
    let whole = |(shard, member): (usize, &Member)| {
        let owner = (0..loads.len()).min_by_key(|rank| loads[*rank]).unwrap_or(0);
        loads[owner] += member.elements;
        let length = shards[shard].shard.own.elem_count();
        let ranges = (0..loads.len()).map(|rank| layout::range(member, rank, length)).collect();
        let trained = (member.parameter, &parameters[member.parameter]);
        let own = || Piece::new(trained, 0..member.elements, 0, Some(rule(member)));
        let own = (owner == process_group.rank()).then(own).transpose()?;
        Ok(Whole { parameter: member.parameter, owner, shard, ranges, own })
    };
    members.into_iter().map(whole).collect()
}

impl<R: UpdateRule> ZeroRedundancyOptimizer<R> {
    /// Lets the owners update their parameters, if these are `pending`, and brings the new values to the ranks that have pieces.
    pub(super) fn update_wholes(&self, pending: &[bool], scales: &[f64]) -> Result<()> {
        let present = || self.wholes.iter().filter(|whole| pending[whole.parameter]);
        let gradient = |whole| {
            let Whole { shard, own, .. }: &Whole = whole;
            let gradients = &self.shards[*shard].shard.own;
            let zeros = |own: &Piece| Tensor::zeros(own.elements, gradients.dtype(), gradients.device());
            let tensor = own.as_ref().map(zeros).transpose()?;
            let part = self.piece(whole).map(|piece| self.shards[*shard].gradient(piece)).transpose()?;
            Ok(Moved { whole, tensor, part })
        };
        let gradients = present().map(gradient).collect::<Result<Vec<_>>>()?;
        self.exchange(&gradients, Way::ToOwners)?;
        let mut parts = Vec::new();
        for Moved { whole, tensor, .. } in gradients {
            let (Some(own), Some(gradient)) = (&whole.own, tensor) else { continue };
            let shape = self.parameters[whole.parameter].var.shape();
            parts.push(self.part(own, gradient, Some(shape), scales)?);
        }
        update::update(&parts, &vec![Sums::default(); parts.len()])?;
        drop(parts);
        let values = present().map(|whole| match &whole.own {
            // Its piece is a view of the same variable.
            Some(own) => Moved { whole, tensor: Some(own.values.clone()), part: None },
            None => Moved { whole, tensor: None, part: self.piece(whole).map(|piece| piece.values.clone()) },
        });
        self.exchange(&values.collect::<Vec<_>>(), Way::FromOwners)
    }

    /// Copies the states `name` of parameters in the shard `number`, if they have owners, to their places in each rank's `part` of
    /// the bucket.
    pub(super) fn spread_states(&self, number: usize, name: &str, part: &Tensor) -> Result<()> {
        let has = |whole: &&Whole| whole.shard == number && self.options_of(whole.parameter).states().contains(&name);
        let state = |whole| {
            let Whole { parameter, own, .. }: &Whole = whole;
            let tensor = own.as_ref().and_then(|own| self.state(*parameter, name, &own.states).cloned());
            let part = self.piece(whole).map(|piece| part.narrow(0, piece.offset, piece.elements)).transpose()?;
            Ok(Moved { whole, tensor, part })
        };
        self.exchange(&self.wholes.iter().filter(has).map(state).collect::<Result<Vec<_>>>()?, Way::FromOwners)
    }

    /// This rank's piece of a parameter that has an owner.
    fn piece(&self, whole: &Whole) -> Option<&Piece> {
        self.shards[whole.shard].pieces.iter().find(|piece| piece.parameter == whole.parameter)
    }

    /// Moves the parts of tensors between their owners and the other ranks.
    fn exchange(&self, all: &[Moved], way: Way) -> Result<()> {
        let rank = self.process_group.rank();
        let mut batch = Vec::new();
        for Moved { whole: Whole { owner, ranges, .. }, tensor, part } in all {
            if let Some(tensor) = tensor {
                for (peer, range) in ranges.iter().enumerate().filter(|(_, range)| !range.is_empty()) {
                    let tensor = tensor.narrow(0, range.start, range.len())?;
                    match (way, part) {
                        (_, None) if peer == rank => {}
                        (Way::ToOwners, Some(part)) if peer == rank => copy::copy(&tensor, part)?,
                        (Way::FromOwners, Some(part)) if peer == rank => copy::copy(part, &tensor)?,
                        (Way::ToOwners, _) => batch.push(P2pOp::Recv { tensor, peer }),
                        (Way::FromOwners, _) => batch.push(P2pOp::Send { tensor, peer }),
                    }
                }
            } else if let Some(tensor) = part.clone() {
                batch.push(match way {
                    Way::ToOwners => P2pOp::Send { tensor, peer: *owner },
                    Way::FromOwners => P2pOp::Recv { tensor, peer: *owner },
                });
            }
        }
        self.process_group.batch_isend_irecv(&batch)?.wait()
    }
}
