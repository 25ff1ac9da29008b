//! Selects the reduction strategy: a communication hook, or the shards of a ZeroRedundancyOptimizer.
use super::Reducer;
use super::state::Rebuild;
use crate::ddp::bucket::Bucket;
use crate::ddp::comm_hook::{CommHook, CommHookTraffic};
use crate::ddp::reduction::Reduction;
use crate::ddp::reduction::hook::{HookReduction, RunningHook};
use crate::ddp::reduction::shard::{BucketMemory, PendingGradients, Shard, ShardReduction};
use crate::{Error, Result};
use std::sync::Arc;

impl Reducer {
    /// Checks whether a communication hook may be registered now.
    pub(crate) fn check_comm_hook(&self) -> Result<()> {
        let state = self.lock();
        let reason = match state.reduction {
            Reduction::Hook(_) => {
                "the model already has a communication hook, which cannot be replaced: register a \
                                   hook once"
            }
            Reduction::Shard(_) => {
                "a ZeroRedundancyOptimizer reduces the gradients, and cannot be combined with a communication hook: \
                 use another optimizer, or no hook"
            }
            Reduction::Tree(_) => {
                "virtual ranks add gradients along a fixed tree, and cannot be combined with a communication hook: use no hook, or \
                 a group without virtual ranks"
            }
            Reduction::AllReduce if state.parameters.iter().any(|parameter| parameter.block.is_some()) => {
                "the model is sharded, and each rank gets its part of the gradients: use no hook, or no sharding"
            }
            Reduction::AllReduce if state.begun => "it must be registered before the first backward pass",
            Reduction::AllReduce => return Ok(()),
        };
        Err(Error::invalid("comm_hook", reason))
    }

    /// Lets `hook` reduce the buckets from now on.
    pub(crate) fn set_comm_hook(&self, hook: impl CommHook) -> Result<()> {
        let mut state = self.lock();
        let state = &mut *state;
        // They may have lost it to an optimizer that is gone.
        state.buckets.iter_mut().try_for_each(Bucket::fill)?;
        let reduction = HookReduction::new(hook);
        if reduction.is_local() {
            // A local hook sends nothing, so the ranks cannot agree on an order, and rank 0's need not suit the others.
            state.rebuild = Rebuild::Done;
        }
        state.reduction = Reduction::Hook(reduction);
        state.reduction.set_buckets(&state.buckets, &state.parameters)
    }

    /// Runs `work` on the registered hook.
    pub(crate) fn with_comm_hook<T>(&self, work: impl FnOnce(&mut dyn RunningHook) -> Result<T>) -> Result<T> {
        match &mut self.lock().reduction {
            Reduction::Hook(reduction) => work(reduction.hook()),
            Reduction::AllReduce | Reduction::Shard(_) | Reduction::Tree(_) => {
                Err(Error::invalid("comm_hook", "no communication hook is registered"))
            }
        }
    }

    pub(crate) fn comm_hook_traffic(&self) -> Option<CommHookTraffic> {
        match &self.lock().reduction {
            Reduction::AllReduce | Reduction::Shard(_) | Reduction::Tree(_) => None,
            Reduction::Hook(reduction) => Some(reduction.traffic()),
        }
    }

    /// Checks whether [`shard`](Self::shard) is possible now.
    pub(crate) fn check_shard(&self) -> Result<()> {
        let state = self.lock();
        let reason = match state.reduction {
            Reduction::Hook(_) => {
                "a communication hook reduces its gradients, and cannot be combined with a ZeroRedundancyOptimizer: \
                 use another optimizer, or no hook"
            }
            Reduction::Shard(_) => "another ZeroRedundancyOptimizer already reduces its gradients: drop that one first",
            Reduction::Tree(_) if state.computed > 0 => {
                "some micro-batches of a step have been computed: create the optimizer between two steps"
            }
            Reduction::AllReduce if state.accumulated.contains(&true) => {
                "gradients are accumulating under no_sync: create the optimizer before that, or after the next \
                 synchronised backward pass"
            }
            Reduction::AllReduce | Reduction::Tree(_) if self.groups.are_two() => {
                "a ZeroRedundancyOptimizer needs all variables on one device, but they are on the CPU and on a GPU: \
                 use another optimizer, or put the whole model on one device"
            }
            Reduction::AllReduce | Reduction::Tree(_) => return Ok(()),
        };
        Err(Error::invalid("ddp", reason))
    }

    /// From now on, a backward pass leaves each rank with the mean of its part of each bucket, and the layout of the
    /// buckets is final.
    pub(crate) fn shard(&self) -> Result<(Vec<Shard>, Arc<BucketMemory>)> {
        self.check_shard()?;
        let mut state = self.lock();
        if let Rebuild::Due(order) = std::mem::replace(&mut state.rebuild, Rebuild::Done) {
            state.rebuild_buckets(&order, &self.groups)?;
        }
        state.buckets.iter_mut().try_for_each(Bucket::fill)?;
        let keeps_buckets = matches!(state.reduction, Reduction::Tree(_));
        let shard = |bucket| Shard::new(bucket, self.groups.within(), keeps_buckets);
        let shards = state.buckets.iter().map(shard).collect::<Result<_>>()?;
        let tree = match std::mem::take(&mut state.reduction) {
            Reduction::Tree(tree) => Some(tree),
            _ => None,
        };
        let reduction = ShardReduction::new(&self.groups, shards, tree);
        let shards = reduction.shards();
        state.reduction = Reduction::Shard(reduction);
        state.free_buckets();
        Ok(shards)
    }

    /// Returns to all-reducing gradients, or to adding them along the tree of virtual ranks.
    pub(crate) fn unshard(&self) {
        let mut state = self.lock();
        state.reduction = match std::mem::take(&mut state.reduction) {
            Reduction::Shard(shard) => shard.into_tree().map_or(Reduction::AllReduce, Reduction::Tree),
            other => other,
        };
    }

    /// Whether a communication hook leaves each rank alone.
    pub(crate) fn is_local(&self) -> bool {
        self.lock().is_local()
    }

    /// Whether a ZeroRedundancyOptimizer uses the gradients.
    pub(crate) fn is_sharded(&self) -> bool {
        matches!(self.lock().reduction, Reduction::Shard(_))
    }

    /// The gradients in the shards that no optimizer has used yet.
    pub(crate) fn pending(&self) -> Result<PendingGradients> {
        self.with_shards(|reduction| reduction.pending().cloned())
    }

    /// Makes the next user of the shards' gradients multiply them by `factor`.
    pub(crate) fn scale_pending(&self, factor: f64) -> Result<()> {
        self.with_shards(|reduction| reduction.pending().map(|pending| pending.scale *= factor))
    }

    /// Records that the shards' gradients were used.
    pub(crate) fn clear_pending(&self) -> Result<()> {
        self.with_shards(|reduction| {
            reduction.clear_pending();
            Ok(())
        })
    }

    fn with_shards<T>(&self, work: impl FnOnce(&mut ShardReduction) -> Result<T>) -> Result<T> {
        match &mut self.lock().reduction {
            Reduction::Shard(reduction) => work(reduction),
            _ => Err(Error::invalid("ddp", "its gradients are not sharded: create a ZeroRedundancyOptimizer for it")),
        }
    }
}
