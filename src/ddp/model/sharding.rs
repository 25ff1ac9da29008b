//! The option that spreads a model over the ranks.
use crate::backend::Purpose;
use crate::ddp::buckets::groups::Groups;
use crate::process_group::ProcessGroup;
use crate::{Error, Result};

pub(in crate::ddp) static DDP_NEW: Purpose = Purpose::of("DistributedDataParallel::new");

/// How a model and its state are spread over the ranks, so that each has a part: [`DdpOptions::sharding`](crate::DdpOptions::sharding).
///
/// ```
/// use candle_core::Module;
/// use candle_ddp::nn::{Linear, linear};
/// use candle_ddp::{Block, DdpOptions, Sharding, block, prelude::*};
///
/// struct Net(Vec<Block<Linear>>);
///
/// fn net(vb: VarBuilder) -> candle_core::Result<Net> {
///     // Before: `linear(8, 8, vb.pp(index))`.
///     Ok(Net((0..3).map(|index| block(vb.pp(index), |vb| linear(8, 8, vb))).collect::<candle_core::Result<_>>()?))
/// }
///
/// impl Module for Net {
///     fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
///         self.0.iter().try_fold(x.clone(), |x, block| block.forward(&x)?.tanh()) // the same as without blocks
///     }
/// }
///
/// fn main() -> Result<()> {
///     candle_ddp::spawn(2, |pg| {
///         // Or `Sharding::Optimizer { ranks: None }`, for which a model needs no blocks.
///         let sharding = Sharding::Blocks { reshard_after_forward: true, ranks: None };
///         let options = DdpOptions { sharding, ..Default::default() };
///         let ddp = DistributedDataParallel::with_options(&pg, &VarMap::new(), net, options)?;
///         let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default())?; // before the first backward pass
///         let x = Tensor::randn(0f32, 1., (4, 8), pg.device())?;
///         let mut grads = ddp.backward(&ddp.forward(&x)?.sqr()?.mean_all()?)?;
///         optimizer.clip_grad_norm(&mut grads, 1.)?;
///         optimizer.step(&grads)
///     })?;
///     Ok(())
/// }
/// ```
///
/// `docs/memory.md` compares what each of them saves.
/// A model that is sharded leaves the gradients of its parameters to its [optimizer](crate::optim::FusedOptimizer#sharded-models), which must
/// be made before the first backward pass: [`backward`](crate::DistributedDataParallel::backward) returns a store without them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Sharding {
    /// Nothing: every rank has all parameters, gradients and states.
    #[default]
    Off,
    /// Gradients and the optimizer's state, ZeRO's stage 2. Every rank has all parameters, and updates a part of them. The buckets are
    /// sent in the reverse of the registration order.
    Optimizer {
        /// The number of consecutive ranks that have the gradients and the state together; None: all ranks. It must divide the world
        /// size. Each such set of ranks has a copy of them, and gathers the updated parameters without the others; gradients are
        /// averaged over all ranks. With [`pg.local_world_size()`](crate::ProcessGroup::local_world_size), only these averages are
        /// sent between hosts. Under [virtual ranks](crate::InitOptions::virtual_ranks), whole buckets are.
        ranks: Option<usize>,
    },
    /// Parameters, gradients and the optimizer's state: PyTorch's FSDP2 (`fully_shard`), ZeRO's stage 3. The model marks its blocks with
    /// [`block`](crate::block), whose whole parameters exist only while they compute; those outside of blocks exist for a whole step.
    ///
    /// The `VarMap` has this rank's part of each parameter under the parameter's name, in a tensor of the same rank: (1, n) for a matrix,
    /// where n may be 0. All ranks must run the same blocks in the same order, in forward passes under [`no_grad`](crate::nn::no_grad) as
    /// well. `docs/memory.md` has the rest: checkpoints, evaluation, and which bits stay the same.
    Blocks {
        /// Whether a block's parameters are freed after its forward pass: usually true. Otherwise they stay until the backward pass has
        /// ended, which then computes nothing again: less time, more memory.
        reshard_after_forward: bool,
        /// The number of consecutive ranks that have a model together: PyTorch's hybrid sharding (HSDP). It must divide the world size.
        /// Each such set of ranks has a copy of the model, and gathers parameters without the others; gradients are averaged over all
        /// ranks. With [`pg.local_world_size()`](crate::ProcessGroup::local_world_size), only these averages are sent between hosts.
        /// None: all ranks.
        ranks: Option<usize>,
    },
}

impl Sharding {
    /// The groups of a model. Every rank must call it.
    pub(in crate::ddp) fn groups(self, group: &ProcessGroup) -> Result<Groups> {
        let (Self::Blocks { ranks, .. } | Self::Optimizer { ranks: ranks @ Some(_) }) = self else {
            return Ok(Groups::new(group.clone()));
        };
        let world_size = group.world_size();
        let ranks = match ranks.unwrap_or(world_size) {
            ranks if ranks > 0 && world_size.is_multiple_of(ranks) => Ok(ranks),
            ranks => {
                let reason = format!("`ranks` must divide the number of ranks, {world_size}, but is {ranks}");
                Err(Error::invalid("sharding", reason))
            }
        };
        let report = ranks.as_ref().map(|_| format!("sharding: {self:?}"));
        let compared = DDP_NEW.during(|| group.compare(report, "it could not build its model"));
        let ranks = ranks?;
        if let Some((rank, difference)) = compared? {
            return Err(Error::Mismatch { what: "model", rank, difference });
        }
        Groups::sharded(group.clone(), ranks)
    }
}
