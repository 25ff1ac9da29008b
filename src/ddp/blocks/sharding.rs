//! The option.
use crate::{Error, Result};

/// How the parameters of a model are spread over the ranks: each rank keeps its part of every parameter, of its gradient and of its
/// optimizer's state. PyTorch's FSDP2 (`fully_shard`), ZeRO's stage 3.
///
/// The model marks its blocks with [`block`](crate::block). A block's whole parameters exist only while it computes: they are gathered from all ranks
/// before its forward pass and before its backward pass, which computes the forward pass again as [`checkpoint`](crate::nn::checkpoint)
/// does. While a block computes, the next one is gathered. The parameters outside of blocks are gathered for the whole of forward and
/// backward pass.
///
/// The `VarMap` has this rank's part of each parameter under the parameter's name, in a tensor of the same rank: (1, n) for a matrix, where
/// n may be 0. A
/// [`ZeroRedundancyOptimizer`](crate::optim::ZeroRedundancyOptimizer) trains them, and must be made before the first backward pass.
/// A [`Checkpointer`](crate::checkpoint::Checkpointer) saves them, each rank its own part, and loads them on any number of ranks, with
/// or without sharding. Losses and parameters have the same bits as without, on CPUs, unless a sum over whole gradients enters the step, as in clipping.
///
/// All ranks must run the same blocks in the same order, in forward passes under [`no_grad`](crate::nn::no_grad) as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sharding {
    /// Whether a block's parameters are freed after its forward pass. Otherwise they stay until the backward pass has ended, which then
    /// computes nothing again: less time, more memory. Default: true.
    pub reshard_after_forward: bool,
    /// The number of consecutive ranks that have a model together: PyTorch's hybrid sharding (HSDP). It must divide the world size. Each
    /// such set of ranks has a copy of the model, and gathers parameters without the others; gradients are averaged over all ranks.
    /// With [`pg.local_world_size()`](crate::ProcessGroup::local_world_size), only these averages are sent between hosts. Default: None, all ranks.
    pub shard_ranks: Option<usize>,
}

impl Sharding {
    /// The number of ranks that have a model together, in a group of `world_size`.
    pub(super) fn ranks(&self, world_size: usize) -> Result<usize> {
        match self.shard_ranks {
            None => Ok(world_size),
            Some(ranks) if ranks > 0 && world_size.is_multiple_of(ranks) => Ok(ranks),
            Some(ranks) => {
                let reason = format!("`shard_ranks` must divide the number of ranks, {world_size}, but is {ranks}");
                Err(Error::invalid("sharding", reason))
            }
        }
    }
}

impl Default for Sharding {
    fn default() -> Self {
        Self { reshard_after_forward: true, shard_ranks: None }
    }
}
