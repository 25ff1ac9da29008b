//! The methods of a reducer for communication hooks and for the optimizers of sharded models.
use super::state::{Rebuild, State};
use super::{Gradient, Part, Reducer};
use crate::ddp::comm_hook::CommHook;
use crate::ddp::reduction::Reduction;
use crate::ddp::reduction::hook::{HookReduction, RunningHook};
use crate::ddp::reduction::shard::{BucketMemory, PendingGradients, Shard, ShardReduction};
use crate::goes_with::Feature;
use crate::trace::Trace;
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
            Reduction::Shard(_) => return Feature::CommHook.goes_with(Feature::ShardedOptimizer),
            Reduction::Tree(_) => return Feature::CommHook.goes_with(Feature::VirtualRanks),
            Reduction::AllReduce if state.begun => "it must be registered before the first backward pass",
            Reduction::AllReduce => return Ok(()),
        };
        Err(Error::invalid("comm_hook", reason))
    }

    /// Lets `hook` reduce the buckets from now on.
    pub(crate) fn set_comm_hook(&self, hook: impl CommHook) -> Result<()> {
        let mut state = self.lock();
        let state = &mut *state;
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

    pub(crate) fn comm_hook_traffic(&self) -> Option<(u64, Option<u64>)> {
        match &self.lock().reduction {
            Reduction::AllReduce | Reduction::Shard(_) | Reduction::Tree(_) => None,
            Reduction::Hook(reduction) => Some(reduction.traffic()),
        }
    }

    /// This rank's part of each bucket, and the memory of buckets, for the model's only optimizer.
    pub(crate) fn shards(&self) -> Result<(Vec<Shard>, Arc<BucketMemory>)> {
        self.with_shards(|reduction| match reduction.has_optimizer() {
            true => Err(Error::invalid("ddp", "it has another optimizer already: drop that one first")),
            false => Ok(reduction.shards()),
        })
    }

    /// Whether a communication hook leaves each rank alone.
    pub(crate) fn is_local(&self) -> bool {
        self.lock().is_local()
    }

    /// Whether an optimizer must use the gradients, and there is none.
    pub(crate) fn lacks_optimizer(&self) -> bool {
        matches!(&self.lock().reduction, Reduction::Shard(shard) if !shard.has_optimizer())
    }

    /// Whether the model sends gradients in a pass that `synchronises` it or, under `no_sync`, does not.
    pub(crate) fn sends(&self, synchronises: bool) -> bool {
        self.lock().reduction.sends(synchronises)
    }

    /// Whether each rank gets its part of the gradients.
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
            _ => Err(Error::invalid("sharding", "every rank has all gradients of the model")),
        }
    }
}

impl State {
    /// Ends a pass under `no_sync` whose sums are in the shards, so that there are no results.
    pub(super) fn keep_parts(&mut self, part: &mut Part, trace: Option<&Trace>) -> Result<Vec<Gradient>> {
        if let Reduction::Shard(shard) = &mut self.reduction {
            shard.keep(&mut self.buckets, part.active.divisor(), trace)?;
        }
        self.accumulated.clone_from(&part.used);
        self.accumulated_count = self.own_count(part.count);
        self.accumulated_finding = part.findings.own.take();
        Ok(self.parameters.iter().map(|_| Gradient::Absent).collect())
    }
}
