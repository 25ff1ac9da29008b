//! Reduction of full buckets, and the exchange of which rank used which parameter.
pub(super) mod hook;
pub(super) mod shard;
pub(super) mod tree;
mod tree_sum;

use super::buckets::bucket::{Bucket, Message};
use super::buckets::groups::Groups;
use super::buckets::plan::ParameterInfo;
use super::buckets::usage::Usage;
use super::model::sharding::Sharding;
use crate::backend::Label;
use crate::process_group::ProcessGroup;
use crate::trace::Trace;
use crate::virtual_ranks::VirtualRanks;
use crate::{ReduceOp, Result};
use hook::HookReduction;
use shard::ShardReduction;
use tree::TreeReduction;

/// How buckets are reduced; identical on all ranks.
#[derive(Default)]
pub(super) enum Reduction {
    /// Each bucket is all-reduced in place, with its used flags.
    #[default]
    AllReduce,
    /// A communication hook gets the gradients of each bucket; the used flags of all buckets are sent separately.
    Hook(HookReduction),
    /// Each rank gets its part of each bucket (ZeRO).
    Shard(Box<ShardReduction>),
    /// Gradients are added along the tree over the micro-batches (virtual ranks).
    Tree(TreeReduction),
}

impl Reduction {
    /// The reduction of a model, which only a communication hook changes.
    pub(super) fn new(sharding: Sharding, ranks: Option<VirtualRanks>, groups: &Groups) -> Result<Self> {
        let tree = ranks.map(|ranks| TreeReduction::new(ranks, groups.main())).transpose()?;
        Ok(match (sharding, tree) {
            (Sharding::Off, None) => Self::AllReduce,
            (Sharding::Off, Some(tree)) => Self::Tree(tree),
            (Sharding::Optimizer { .. } | Sharding::Blocks { .. }, tree) => {
                Self::Shard(Box::new(ShardReduction::new(groups, tree)))
            }
        })
    }

    /// The tree along which gradients are added, under virtual ranks.
    pub(super) fn tree(&self) -> Option<&TreeReduction> {
        match self {
            Self::Tree(tree) => Some(tree),
            Self::Shard(shard) => shard.tree(),
            Self::AllReduce | Self::Hook(_) => None,
        }
    }

    pub(super) fn tree_mut(&mut self) -> Option<&mut TreeReduction> {
        match self {
            Self::Tree(tree) => Some(tree),
            Self::Shard(shard) => shard.tree_mut(),
            Self::AllReduce | Self::Hook(_) => None,
        }
    }

    /// The factor by which gradients are multiplied on their way into a bucket, so that sums over the ranks are divided by
    /// `divisor`.
    pub(super) fn scale(&self, divisor: usize) -> f64 {
        match self {
            Self::AllReduce | Self::Shard(_) => 1.0 / divisor as f64,
            Self::Hook(_) => 1.0,
            // The root of the tree is divided.
            Self::Tree(_) => 1.0,
        }
    }

    /// Call after the buckets were rebuilt.
    pub(super) fn set_buckets(&mut self, buckets: &[Bucket], parameters: &[ParameterInfo]) -> Result<()> {
        match self {
            Self::AllReduce | Self::Tree(_) => Ok(()),
            Self::Shard(shard) => shard.set_buckets(buckets),
            Self::Hook(hook) => hook.set_buckets(buckets, parameters),
        }
    }

    /// Whether every pass sends its buckets, also under `no_sync`, where each rank adds up its parts of them.
    pub(super) fn adds_up_parts(&self) -> bool {
        matches!(self, Self::Shard(shard) if shard.tree().is_none())
    }

    /// Whether a pass that `synchronises` or, under `no_sync`, does not, sends its buckets.
    pub(super) fn sends(&self, synchronises: bool) -> bool {
        synchronises || self.adds_up_parts()
    }

    /// Begins a backward pass, which ends a step if it `is_last`. `adds_up`: its gradients are added to those that the shards hold.
    pub(super) fn begin(&mut self, adds_up: bool, is_last: bool, divisor: usize) -> Result<()> {
        match self {
            Self::AllReduce | Self::Hook(_) | Self::Tree(_) => Ok(()),
            Self::Shard(shard) => shard.begin(adds_up, is_last, divisor),
        }
    }

    /// The purpose of the collectives that reduce the bucket `number`.
    pub(super) fn label(&self, number: usize, bucket: &Bucket) -> Label {
        match self {
            Self::Shard(shard) => shard.label(number, bucket),
            Self::AllReduce | Self::Hook(_) | Self::Tree(_) => bucket.label,
        }
    }

    /// Call when a backward pass has succeeded.
    pub(super) fn end(&mut self) {
        if let Self::Shard(shard) = self {
            shard.end();
        }
    }

    /// Discards the gradients of a backward pass that has failed.
    pub(super) fn discard(&mut self) {
        match self {
            Self::AllReduce => {}
            Self::Hook(hook) => hook.discard(),
            Self::Shard(shard) => shard.discard(),
            Self::Tree(tree) => tree.discard(),
        }
    }

    /// The number by which its results are sums over the ranks divided, if [`scale`](Self::scale) had this `divisor`.
    pub(super) fn divisor(&self, divisor: usize, world_size: usize) -> usize {
        if let Some(tree) = self.tree() {
            // The mean is that over the micro-batches.
            return tree.ranks().count();
        }
        match self {
            Self::AllReduce | Self::Shard(_) | Self::Tree(_) => divisor,
            Self::Hook(hook) if hook.is_local() => 1,
            // A hook computes a mean over all ranks.
            Self::Hook(_) => world_size,
        }
    }

    /// Sends the full bucket `number`. `used` says which members this rank used, if it missed any.
    pub(super) fn launch(
        &mut self,
        number: usize,
        bucket: &mut Bucket,
        used: Option<&[bool]>,
        message: Message,
        group: &ProcessGroup,
    ) -> Result<()> {
        match self {
            Self::AllReduce => {
                let work = group.all_reduce_async(bucket.seal(used, message, group)?, ReduceOp::Sum)?;
                bucket.work = Some(work);
                Ok(())
            }
            Self::Hook(hook) => hook.launch(number, group),
            Self::Shard(shard) => shard.launch(number, bucket, group),
            Self::Tree(tree) => tree.launch(number, bucket, group),
        }
    }

    /// Waits until all buckets hold their results. `used` says which parameters this rank used, in registration order.
    /// Returns which any rank used, and the ranks' messages, unless the buckets themselves tell.
    pub(super) fn finish(
        &mut self,
        buckets: &mut [Bucket],
        used: &[bool],
        message: Message,
        groups: &Groups,
        trace: Option<&Trace>,
    ) -> Result<Option<Usage>> {
        match self {
            Self::AllReduce => {
                buckets.iter().enumerate().try_for_each(|(number, bucket)| bucket.finish(number, trace))?;
                Ok(None)
            }
            Self::Hook(hook) => hook.finish(used, message, groups, trace),
            Self::Shard(shard) => shard.finish(buckets, used, message, groups, trace).map(Some),
            Self::Tree(tree) => tree.finish(buckets, used, message, groups, trace).map(Some),
        }
    }
}
