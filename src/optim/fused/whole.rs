//! Parameters that their rule updates only as a whole. Each belongs to one rank, its owner, which has the state. At a step, the owner
//! gets the parts of the gradient from the other ranks, and those of the value if its model is sharded, and sends them their parts of the
//! new value.
use super::slot::{self, OwnShard, Piece, Slot};
use crate::Result;
use crate::backend::P2pOp;
use crate::optim::rule::UpdateRule;
use crate::placement::Spread;
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
    pub(super) shard: usize,
    /// The elements of it that are in each rank's part of the bucket.
    ranges: Vec<Range<usize>>,
    /// All of it, on its owner.
    pub(super) own: Option<Piece>,
}

/// A flat tensor. Its owner has the whole, and each rank a part; None on ranks that have none.
#[derive(Clone)]
pub(super) struct Moved<'a> {
    pub(super) whole: &'a Whole,
    pub(super) tensor: Option<Tensor>,
    pub(super) part: Option<Tensor>,
}

#[derive(Clone, Copy)]
pub(super) enum Way {
    ToOwners,
    FromOwners,
}

/// The parameters that their rules need as a whole, the largest first. Each belongs to the rank that has the fewest elements so far.
pub(super) fn wholes<R: UpdateRule>(
    shards: &[OwnShard],
    slots: &[Slot],
    options: &[R],
    (within, spread): (&ProcessGroup, Spread),
) -> Result<Vec<Whole>> {
    let rule = |parameter: usize| &options[slots[parameter].group];
    let elements = |parameter: usize| slots[parameter].placement.shape.elem_count();
    let members = shards.iter().enumerate().flat_map(|(shard, own)| {
        own.shard.parameters.iter().enumerate().map(move |(place, parameter)| (shard, place, *parameter))
    });
    let mut members: Vec<_> = members.filter(|(.., parameter)| !slot::takes_pieces(rule(*parameter))).collect();
    // The owners do not depend on the order of the buckets.
    members.sort_by_key(|(.., parameter)| (Reverse(elements(*parameter)), *parameter));
    let mut loads = vec![0; within.world_size()];
    let whole = |(shard, place, parameter): (usize, usize, usize)| {
        let owner = (0..loads.len()).min_by_key(|rank| loads[*rank]).unwrap_or(0);
        loads[owner] += elements(parameter);
        let ranges = (0..loads.len()).map(|rank| shards[shard].shard.cut.range(place, rank)).collect();
        let trained = (parameter, &slots[parameter]);
        let own = || Piece::new(trained, (0..elements(parameter), spread), 0, Some(rule(parameter)));
        let own = (owner == within.rank()).then(own).transpose()?;
        Ok(Whole { parameter, owner, shard, ranges, own })
    };
    members.into_iter().map(whole).collect()
}

/// Moves the parts of tensors between their owners and the other ranks, `within` the ranks over which they are spread. Every rank must call
/// it.
pub(super) fn exchange(all: &[Moved], way: Way, within: &ProcessGroup) -> Result<()> {
    let rank = within.rank();
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
    within.batch_isend_irecv(&batch)?.wait()
}
