//! Virtual ranks: a step is one backward pass for each micro-batch.
use crate::ddp::model::DistributedModel;
use crate::ddp::pass::Pass;
use crate::goes_with::Feature;
use crate::panic::lock;
use crate::tensor::seed::{Drawn, take_drawn};
use crate::{Error, Result};
use candle_core::Tensor;
use std::time::Instant;

/// Every micro-batch's number, in the order of the micro-batches.
pub(in crate::ddp) fn gather(model: &DistributedModel, own: &[f64]) -> Result<Vec<f64>> {
    let group = model.group();
    let Some(ranks) = model.reducer.virtual_ranks() else {
        return Err(Error::invalid("own", "the process group has no virtual ranks: set InitOptions.virtual_ranks"));
    };
    let own = Tensor::from_slice(own, own.len(), group.device())?;
    let all = group.all_gather_varied(&own, 0)?;
    for (rank, values) in all.iter().enumerate() {
        let (found, expected) = (values.elem_count(), ranks.block(rank).len());
        if found != expected {
            let reason = format!("rank {rank} has {expected} micro-batches in a step, and gave {found} values");
            return Err(Error::invalid("own", reason));
        }
    }
    Ok(Tensor::cat(&all, 0)?.to_vec1()?)
}

/// Checks that the pass belongs to the next micro-batch. A rank that fails here ends the group, since others wait for its part.
pub(in crate::ddp) fn check(pass: &Pass) -> Result<()> {
    let Some(number) = pass.micro_batch else { return Ok(()) };
    let drawn = take_drawn();
    if drawn != Drawn::Nothing && drawn != Drawn::MicroBatch(number) {
        let reason = format!(
            "layers have drawn random numbers from a generator that is not that of micro-batch {number}, so they depend on the \
             number of ranks: before its forward pass call micro_batch.seed(&generator), where generator is the layers' own or \
             seed::default_generator()"
        );
        return Err(Error::invalid("generator", reason));
    }
    for model in &pass.models {
        model.core.reducer.check_next(number)?;
        if !model.core.synchronises() {
            Feature::NoSync.goes_with(Feature::VirtualRanks)?;
        }
    }
    Ok(())
}

/// Call when this rank has computed the gradients of a micro-batch, before it waits for others. No forward pass of the
/// micro-batch follows, not even that of an `nn::checkpoint`.
pub(in crate::ddp) fn computed(pass: &Pass) -> Result<()> {
    let Some(number) = pass.micro_batch else { return Ok(()) };
    let take = |(model, is_last): (&DistributedModel, bool)| {
        lock(&model.pace).end(Instant::now(), model.reducer.has_trained());
        lock(&model.snapshots).take(&model.variables.buffers, number, is_last)
    };
    pass.models.iter().map(|model| (model.core, model.synchronises)).try_for_each(take)
}

/// Call when the backward pass of a micro-batch has succeeded.
pub(in crate::ddp) fn end(pass: &Pass) -> Result<()> {
    if pass.micro_batch.is_none() {
        return Ok(());
    }
    let mut unfinished = pass.models.iter().filter(|model| !model.synchronises).map(|model| model.core);
    unfinished.try_for_each(|model| lock(&model.snapshots).restore(&model.variables.buffers, "virtual_ranks"))
}
