//! The checks before a backward pass sends anything.
use crate::ddp::model::DistributedModel;
use crate::ddp::pass::Pass;
use crate::ddp::pass::graph::{Graph, Stale};
use crate::ddp::pass::order::Member;
use crate::ddp::watch::non_finite::OnNonFinite;
use crate::tensor::function::{NO_SECOND_ORDER, is_input_gradient};
use crate::warnings::warn_aloud;
use crate::{Error, Result};
use candle_core::{DType, Tensor, TensorId, Var};
use candle_ddp_nn::take_nothing_counted;
use std::collections::HashSet;
use std::sync::Once;
use std::sync::atomic::Ordering;

/// Checks that the loss is one number: candle would compute the gradients of the sum of its elements.
pub(in crate::ddp) fn check_one_number(loss: &Tensor, pass: &Pass) -> Result<()> {
    if loss.elem_count() == 1 {
        return Ok(());
    }
    let reduction = if pass.count.is_some() { "sum_all" } else { "mean_all" };
    let shape = loss.dims();
    Err(Error::invalid("loss", format!("it has shape {shape:?}: reduce it to one number, as with {reduction}()")))
}

/// Checks that the loss does not come from an evaluation, which has no graph.
pub(in crate::ddp) fn check_recorded(loss: &Tensor, pass: &Pass) -> Result<()> {
    let ran_without_graph = |model: &Member| model.core.ran_without_graph.load(Ordering::Relaxed);
    if loss.track_op() || pass.count == Some(0.) || !pass.models.iter().any(ran_without_graph) {
        return Ok(());
    }
    let reason = "it was computed under no_grad, so it has no graph and would train nothing: call the model and compute the loss \
                  outside of no_grad. (A rank without samples, whose loss is a constant, gives a count of 0: Backward { count: Some(0.), .. }.)";
    Err(Error::invalid("loss", reason))
}

/// The loss if it is not finite, and [`OnNonFinite::Stop`] is to end the run. Its gradients may be finite: a cross entropy that ignores
/// all targets has zeros.
///
/// Without a question to a GPU, it is also known whether a mean is NaN because no target counted, which a warning says once.
pub(in crate::ddp) fn not_finite(loss: &Tensor, pass: &Pass) -> Result<Option<f64>> {
    let is_stop = |model: &Member| model.core.options.policy() == OnNonFinite::Stop;
    let (stops, nothing_counted) = (pass.models.iter().any(is_stop), take_nothing_counted());
    if !stops && !nothing_counted {
        return Ok(None);
    }
    let value = loss.detach().flatten_all()?.get(0)?.to_dtype(DType::F64)?.to_scalar::<f64>()?;
    if nothing_counted && value.is_nan() {
        static ONCE: Once = Once::new();
        let rank = pass.models[0].core.group().rank();
        ONCE.call_once(|| {
            warn_aloud(format_args!(
                "the loss on rank {rank} is NaN, since no target of a cross entropy counted: all have ignore_index, or classes of \
                 weight 0. The mean over none is 0/0, as in PyTorch. Its gradients are zeros, and count as those of a whole batch. Leave out such batches \
                 when you make them, or give the sum of the losses and its count: `Backward {{ count: Some(n), .. }}`"
            ));
        });
    }
    Ok((stops && !value.is_finite()).then_some(value))
}

/// Checks that the loss depends on one of the models, so that no rank silently trains nothing.
pub(in crate::ddp) fn check_reached(pass: &Pass) -> Result<()> {
    let reaches = |model: &Member, graph: &Graph| graph.completes(model.core.reducer.identity()).is_some();
    let gathers = |model: &&Member| model.core.blocks.as_ref().is_some_and(|blocks| blocks.units.gathers_again());
    let is_without = |model: &&Member| gathers(model) && !pass.graph.iter().any(|graph| reaches(model, graph));
    if pass.count == Some(0.)
        && let Some(model) = pass.models.iter().find(is_without)
    {
        let reason = format!(
            "the loss of a rank without samples must depend on the model with the parameter {}, since its sharded blocks are gathered \
             from all ranks in the backward pass: run the model on any sample, such as zeros, and multiply the loss by a tensor of 0, \
             `loss.mul(&loss.zeros_like()?)?` (at the number 0, candle cuts the graph)",
            model.core.first_name()
        );
        return Err(Error::invalid("count", reason));
    }
    let is_reached = |graph: &Graph| pass.models.iter().any(|model| reaches(model, graph));
    if pass.graph.iter().any(is_reached) || pass.count == Some(0.) {
        return Ok(());
    }
    for Member { core: model, .. } in &pass.models {
        let refused = |(name, _): &(&String, &Var)| !model.options.unused.allows(name);
        let unused: Vec<String> =
            model.variables.named_parameters().filter(refused).map(|(name, _)| name.clone()).collect();
        if !unused.is_empty() {
            let (rank, total) = (Some(model.group().rank()), model.variables.parameters.len());
            return Err(Error::UnusedParameters { rank, unused, total });
        }
    }
    Ok(())
}

/// Checks that the loss does not depend on a gradient, as far as the graph shows that.
pub(in crate::ddp) fn check_first_order(pass: &Pass) -> Result<()> {
    let identities = || pass.models.iter().map(|model| model.core.reducer.identity());
    let is_used = |graph: &Graph| {
        graph.variables().any(is_input_gradient) || identities().any(|model| graph.used_in_gradient(model).is_some())
    };
    let is_used = pass.graph.as_ref().is_some_and(is_used);
    identities().for_each(|model| model.backward_is_over());
    if is_used { Err(Error::invalid("loss", NO_SECOND_ORDER)) } else { Ok(()) }
}

/// Checks that the graph does not reach into a step whose parameters had other values.
pub(in crate::ddp) fn check_fresh(pass: &Pass) -> Result<()> {
    match pass.graph.as_ref().and_then(Graph::stale) {
        Some(Stale { parameter, is_certain: true }) => Err(Error::StaleGraph { parameter }),
        Some(Stale { parameter, is_certain: false }) => {
            static ONCE: Once = Once::new();
            let warning = Error::StaleGraph { parameter };
            ONCE.call_once(|| warn_aloud(format_args!("if the optimizer has stepped: {warning}")));
            Ok(())
        }
        None => Ok(()),
    }
}

/// Checks everything that can be checked before anything is sent.
pub(in crate::ddp) fn check(pass: &Pass) -> Result<()> {
    if pass.models.is_empty() {
        return Err(Error::invalid("models", "the list is empty: give at least one model"));
    }
    for (index, Member { core: model, .. }) in pass.models.iter().enumerate() {
        if pass.models[..index].iter().any(|other| std::ptr::eq(other.core, *model)) {
            return Err(Error::invalid(
                "models",
                format!(
                    "the model with the parameter {} is given twice: give each \
                                                         model once",
                    model.first_name()
                ),
            ));
        }
        if model.reducer.identity().is_frozen() {
            let reason = format!(
                "the model with the parameter {} is frozen by a guard from its `freeze`: drop the guard before the \
                 backward pass that trains this model",
                model.first_name()
            );
            return Err(Error::invalid("models", reason));
        }
        model.reducer.check_accumulated(pass.count.is_some())?;
        match (pass.micro_batch, model.group().virtual_ranks()) {
            (None, Some(_)) => {
                let reason = "under virtual ranks, each pass belongs to a micro-batch and needs its number: call \
                              `backward_with(&loss, &[&ddp], Backward { micro_batch: Some(number), .. })` for each";
                return Err(Error::invalid("micro_batch", reason));
            }
            (Some(_), None) => {
                let reason =
                    "the process group has no virtual ranks: set InitOptions.virtual_ranks, or give no micro-batch";
                return Err(Error::invalid("micro_batch", reason));
            }
            (Some(_), Some(_)) => check_same_micro_batches(pass.models[0].core, model)?,
            (None, None) => {}
        }
    }
    check_policy(pass)?;
    let identities: Vec<_> = pass.models.iter().map(|model| model.core.reducer.identity()).collect();
    // The graph also contains the variables behind replicas, which may belong to another model too.
    let own: HashSet<TensorId> =
        pass.models.iter().flat_map(|model| model.core.variables.shared()).map(|(_, var)| var.id()).collect();
    match pass.graph.as_ref().and_then(|graph| graph.foreign_parameter(&identities, &own)) {
        Some(parameter) => Err(Error::OtherModelInGraph { parameter: parameter.to_string() }),
        None => Ok(()),
    }
}

/// Checks that all ranks leave out the steps of all models together.
fn check_policy(pass: &Pass) -> Result<()> {
    let first = pass.models[0].core;
    let same = |model: &Member| model.core.options.policy() == first.options.policy();
    let together = |model: &Member| model.core.group().is_same(first.group());
    let is_on = |model: &Member| model.core.options.policy().is_on();
    if pass.models.iter().all(|model| same(model) && (together(model) || !is_on(model))) {
        return Ok(());
    }
    let reason = "the models of one backward pass must have the same DdpOptions::on_non_finite, and, unless that is Ignore, the same \
                  process group, because a step is skipped for all of them or for none";
    Err(Error::invalid("models", reason))
}

/// Checks that a rank computes the same micro-batches for both models.
fn check_same_micro_batches(first: &DistributedModel, model: &DistributedModel) -> Result<()> {
    if model.reducer.virtual_ranks() == first.reducer.virtual_ranks() && model.group().is_same(first.group()) {
        return Ok(());
    }
    let reason = "the models of one backward pass need the same process group, and no share_by_speed between the making of one and \
                  of the next, since a rank computes each micro-batch for all of them";
    Err(Error::invalid("models", reason))
}
