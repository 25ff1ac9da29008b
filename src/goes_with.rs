//! Which features cannot be combined: the one table from which errors, `docs/combining.md` and a test of all pairs are made.
use crate::{Error, Result};
use std::fmt;

/// A feature that a program may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Feature {
    ShardedOptimizer,
    ShardedBlocks,
    VirtualRanks,
    CommHook,
    Join,
    NoSync,
    Into,
    BackwardAndStep,
    GradScaler,
    SyncBatchNorm,
    WithGrad,
    WholeModel,
    NoGradModel,
    FromVars,
    Norms,
    OuterOptimizer,
}

use Feature::*;

impl fmt::Display for Feature {
    /// The feature as programs write it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ShardedOptimizer => "Sharding::Optimizer",
            ShardedBlocks => "Sharding::Blocks",
            VirtualRanks => "InitOptions.virtual_ranks",
            CommHook => "register_comm_hook",
            Join => "join",
            NoSync => "no_sync",
            Into => "Backward.into",
            BackwardAndStep => "backward_and_step",
            GradScaler => "GradScaler",
            SyncBatchNorm => "sync_batch_norm",
            WithGrad => "collectives with a gradient",
            WholeModel => "into_module",
            NoGradModel => "with_no_grad_model",
            FromVars => "from_vars",
            Norms => "clipping by norm or Lamb, under Sharding::Optimizer",
            OuterOptimizer => "PeriodicModelAverager with an outer optimizer",
        })
    }
}

/// Two features that cannot be combined.
struct Refusal {
    features: [Feature; 2],
    /// The argument, option or call that the error is about.
    argument: &'static str,
    reason: &'static str,
}

const fn refusal(features: [Feature; 2], argument: &'static str, reason: &'static str) -> Refusal {
    Refusal { features, argument, reason }
}

/// All other pairs may be combined.
const REFUSALS: &[Refusal] = &[
    refusal(
        [ShardedOptimizer, CommHook],
        "comm_hook",
        "the model is sharded, and each rank gets its part of the gradients: use no hook, or Sharding::Off",
    ),
    refusal(
        [ShardedBlocks, CommHook],
        "comm_hook",
        "the model is sharded, and each rank gets its part of the gradients: use no hook, or Sharding::Off",
    ),
    refusal(
        [VirtualRanks, CommHook],
        "comm_hook",
        "virtual ranks add gradients along a fixed tree, and cannot be combined with a communication hook: use no hook, or a group without \
         virtual ranks",
    ),
    refusal(
        [ShardedBlocks, VirtualRanks],
        "sharding",
        "the tree of virtual ranks adds up each rank's micro-batches before it adds what different ranks have, so a rank's gradients stay whole \
         until its last one, for which sharded blocks leave no memory: use either, or Sharding::Optimizer",
    ),
    refusal(
        [Norms, VirtualRanks],
        "virtual_ranks",
        "under virtual ranks, the optimizer of a sharded model can compute no norms, whose last bits would depend on the number of ranks: \
         use no clipping by norm and no Lamb, or Sharding::Off",
    ),
    refusal(
        [Join, VirtualRanks],
        "join",
        "a join is for ranks with different numbers of batches, and cannot be combined with virtual ranks, of which each has a \
         micro-batch in every step",
    ),
    refusal(
        [NoSync, VirtualRanks],
        "no_sync",
        "it cannot be combined with virtual ranks, under which the gradients of a step's micro-batches add up by themselves",
    ),
    refusal(
        [Into, VirtualRanks],
        "into",
        "under virtual ranks, the gradients of a step's micro-batches add up by themselves: let the loss of a micro-batch be the sum of its losses",
    ),
    refusal(
        [BackwardAndStep, VirtualRanks],
        "optimizer",
        "under virtual ranks a step is one backward pass for each micro-batch: call backward_with for each, and `step` with the \
         gradients of the last one",
    ),
    refusal(
        [SyncBatchNorm, VirtualRanks],
        "virtual_ranks",
        "SyncBatchNorm cannot be combined with virtual ranks, since a rank computes its micro-batches one after the other: use \
         `batch_norm`, which normalises each micro-batch, or `group_norm`",
    ),
    refusal(
        [WithGrad, VirtualRanks],
        "virtual_ranks",
        "collectives with a gradient cannot be combined with virtual ranks, since a rank computes its micro-batches one after the other",
    ),
    refusal(
        [ShardedBlocks, Join],
        "sharding",
        "a join, in which some ranks compute nothing, needs the whole model, of which each rank has a part",
    ),
    refusal(
        [SyncBatchNorm, Join],
        "the input of SyncBatchNorm",
        "it cannot train inside `join`: its statistics need all ranks, and ranks without inputs make no forward passes. Use `batch_norm`, \
         or give all ranks the same number of batches",
    ),
    refusal(
        [WithGrad, Join],
        "collectives with a gradient",
        "they cannot be used within `join`: they need all ranks, and ranks without inputs make no forward passes. Give all ranks the same \
         number of batches",
    ),
    refusal(
        [BackwardAndStep, NoSync],
        "optimizer",
        "under no_sync nothing is averaged, and a step must wait for the mean: call `backward` for the first micro-batches, and \
         backward_and_step outside of no_sync for the last one",
    ),
    refusal(
        [BackwardAndStep, GradScaler],
        "optimizer",
        "backward_and_step updates parameters before it is known whether all gradients are finite: with a scaler, call \
         `ddp.backward(&loss)` and `scaler.step(&mut optimizer, &mut grads)`",
    ),
    refusal(
        [ShardedBlocks, WholeModel],
        "sharding",
        "into_module needs the whole model, of which each rank has a part",
    ),
    refusal(
        [ShardedBlocks, NoGradModel],
        "sharding",
        "with_no_grad_model needs the whole model, of which each rank has a part",
    ),
    refusal(
        [ShardedBlocks, FromVars],
        "sharding",
        "a model of `from_vars` computes with whole variables: build it with `with_options`",
    ),
    refusal(
        [ShardedBlocks, OuterOptimizer],
        "parameters",
        "an outer step needs whole parameters, of which each rank has a part: average the parts of several models without an outer optimizer, \
         or use Sharding::Optimizer",
    ),
];

impl Feature {
    /// # Errors
    /// [`Error::InvalidArgument`] if the two cannot be combined.
    pub(crate) fn goes_with(self, other: Self) -> Result<()> {
        let refused = |refusal: &&Refusal| [[self, other], [other, self]].contains(&refusal.features);
        match REFUSALS.iter().find(refused) {
            Some(refusal) => Err(Error::invalid(refusal.argument, refusal.reason)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_the_table() {
        let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/combining.md")).unwrap();
        let row = |Refusal { features: [first, second], reason, .. }: &Refusal| {
            format!("| `{first}` | `{second}` | {reason} |\n")
        };
        let rows: String = REFUSALS.iter().map(row).collect();
        let (_, found) = page.split_once("|---|---|---|\n").unwrap();
        assert!(found == rows, "the table of docs/combining.md must be:\n{rows}");
    }

    #[test]
    fn a_pair_is_in_one_row_and_is_refused_in_both_orders() {
        for (index, Refusal { features: [first, second], .. }) in REFUSALS.iter().enumerate() {
            let same =
                REFUSALS.iter().position(|other| other.features.contains(first) && other.features.contains(second));
            assert_eq!(same, Some(index), "{first} and {second}");
            assert!(first.goes_with(*second).is_err() && second.goes_with(*first).is_err());
        }
        assert!(Join.goes_with(NoSync).is_ok());
    }
}
