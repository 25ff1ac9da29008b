//! Virtual ranks: a step is one backward pass for each micro-batch.
use super::backward;
use super::model::DistributedModel;
use super::options::DdpOptions;
use super::parameter::{Buffer, Variables};
use super::pass::Pass;
use crate::panic::lock;
use crate::process_group::ProcessGroup;
use crate::tensor::copy;
use crate::tensor::seed::{Drawn, take_drawn};
use crate::virtual_ranks::VirtualRanks;
use crate::{Error, Result};
use candle_core::Tensor;
use candle_core::backprop::GradStore;

/// Values of the buffers, such as running means. Every micro-batch begins with those before the step, and the step leaves
/// those after micro-batch 0, as if each were computed by its own rank.
#[derive(Default)]
pub(super) struct Snapshots {
    before: Option<Vec<Tensor>>,
    after_first: Option<Vec<Tensor>>,
}

/// Checks what the options and the model must fulfil for results that do not depend on the number of ranks.
pub(super) fn check_options(
    options: &DdpOptions,
    variables: &Variables,
    group: &ProcessGroup,
) -> Result<Option<VirtualRanks>> {
    let Some(count) = options.virtual_ranks else { return Ok(None) };
    let refuse = |reason: String| Err(Error::invalid("virtual_ranks", reason));
    if !options.broadcast_buffers && !variables.buffers.is_empty() {
        return refuse(
            "it needs broadcast_buffers, since each rank's own buffers depend on the number of ranks".to_string(),
        );
    }
    if let Some(Buffer { name, .. }) = variables.ignored.first() {
        return refuse(format!(
            "the variable {name} has Role::Ignored, so each rank has its own gradient of it, which depends on the number of ranks: \
             give it another role"
        ));
    }
    VirtualRanks::new(count, group.rank(), group.world_size()).map(Some)
}

/// Runs the backward pass of a micro-batch. Returns the mean gradients after the last one of this rank.
pub(super) fn run(loss: &Tensor, model: &DistributedModel, number: usize) -> Result<Option<GradStore>> {
    let mut pass = Pass::of_micro_batch(loss, model, number);
    let is_last = pass.models.iter().any(|model| model.synchronises);
    let mut all = backward::average(loss, &mut pass)?;
    if !is_last {
        return Ok(None);
    }
    // Gradients of anything else are those of this micro-batch alone.
    let mut grads = GradStore::default();
    for parameter in &model.variables.parameters {
        if let Some(gradient) = all.remove(&parameter.var) {
            grads.insert(&parameter.var, gradient);
        }
    }
    let mark = model.marks().take(&mut all);
    model.marks().put_back(&mut grads, mark);
    Ok(Some(grads))
}

/// Every micro-batch's number, in the order of the micro-batches.
pub(super) fn gather(model: &DistributedModel, own: &[f64]) -> Result<Vec<f64>> {
    let group = model.group();
    let Some(ranks) = model.reducer.virtual_ranks() else {
        return Err(Error::invalid("own", "the model has no virtual ranks: set DdpOptions.virtual_ranks"));
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

/// Checks that the pass is that of the next micro-batch. A rank that fails here ends the group, since others wait for its part.
pub(super) fn check(pass: &Pass) -> Result<()> {
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
            let reason = "it cannot be combined with virtual ranks: backward_micro_batch adds the gradients of a step's \
                          micro-batches up by itself";
            return Err(Error::invalid("no_sync", reason));
        }
    }
    Ok(())
}

fn values(model: &DistributedModel) -> Result<Vec<Tensor>> {
    let copies = model.variables.buffers.iter().map(|buffer| buffer.var.as_detached_tensor().copy());
    Ok(copies.collect::<candle_core::Result<_>>()?)
}

fn set(model: &DistributedModel, values: &[Tensor]) -> Result<()> {
    Ok(copy::copy_all(model.variables.buffers.iter().map(|buffer| buffer.var.as_tensor()).zip(values))?)
}

/// Call before a forward pass: keeps the buffers' values if a step begins.
pub(super) fn keep_buffers(model: &DistributedModel) -> Result<()> {
    if model.options.virtual_ranks.is_some() && !model.variables.buffers.is_empty() && model.reducer.is_between_steps()
    {
        *lock(&model.snapshots) = Snapshots { before: Some(values(model)?), after_first: None };
    }
    Ok(())
}

/// Call when the backward pass of a micro-batch begins, after its forward pass: keeps the buffers' values if it is the first.
/// Before rank 0 sends the buffers, they get these values.
pub(super) fn take_buffers(pass: &Pass) -> Result<()> {
    let Some(number) = pass.micro_batch else { return Ok(()) };
    for model in pass.models.iter().filter(|model| !model.core.variables.buffers.is_empty()) {
        let mut snapshots = lock(&model.core.snapshots);
        if number == 0 {
            snapshots.after_first = Some(values(model.core)?);
        } else if model.synchronises
            && let Some(first) = snapshots.after_first.take()
        {
            set(model.core, &first)?;
        }
    }
    Ok(())
}

/// Call when the backward pass of a micro-batch has succeeded: gives the buffers the values from before the step, unless it
/// is complete.
pub(super) fn restore_buffers(pass: &Pass) -> Result<()> {
    if pass.micro_batch.is_none() {
        return Ok(());
    }
    let unfinished = pass.models.iter().filter(|model| !model.synchronises);
    for model in unfinished.filter(|model| !model.core.variables.buffers.is_empty()) {
        let snapshots = lock(&model.core.snapshots);
        let Some(before) = &snapshots.before else {
            let reason = "the model has buffers, and must run its forward passes through ddp.forward, ddp.forward_t or ddp.call, \
                          which keep their values before each step of micro-batches";
            return Err(Error::invalid("virtual_ranks", reason));
        };
        set(model.core, before)?;
    }
    Ok(())
}
