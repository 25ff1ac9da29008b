//! The option.

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
/// or without sharding. Losses and parameters have the same bits as without.
///
/// All ranks must run the same blocks in the same order, in forward passes under [`no_grad`](crate::nn::no_grad) as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sharding {
    /// Whether a block's parameters are freed after its forward pass. Otherwise they stay until the backward pass has ended, which then
    /// computes nothing again: less time, more memory. Default: true.
    pub reshard_after_forward: bool,
}

impl Default for Sharding {
    fn default() -> Self {
        Self { reshard_after_forward: true }
    }
}
