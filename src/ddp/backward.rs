//! Backward passes of one model or of several models in one graph.
use super::core::Core;
use super::graph::Graph;
use super::reducer::Gradient;
use super::{announce, order, sync};
use crate::panic::panic_message;
use crate::process_group::Active;
use crate::rendezvous::count_step;
use crate::tensor::function;
use crate::{Error, Result};
use candle_core::backprop::GradStore;
use candle_core::{Tensor, TensorId, Var};
use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

/// A [`DistributedDataParallel`](crate::DistributedDataParallel) with any module; [`backward`] takes a list of these.
pub trait DistributedModel: sealed::HasCore {}

impl<T: sealed::HasCore> DistributedModel for T {}

pub(super) mod sealed {
    use crate::ddp::core::Core;

    pub trait HasCore {
        fn core(&self) -> &Core;
    }
}

/// Computes the gradients of a loss that depends on several models in one backward pass, and averages each model's
/// gradients over the ranks of its group. Examples are a generator and a discriminator, an encoder and a decoder, or a
/// student and a trained part of its teacher.
///
/// ```
/// # use candle_core::{DType, Module, Tensor};
/// # use candle_ddp::{DdpOptions, DistributedDataParallel};
/// # use candle_nn::{Optimizer, SGD, VarMap, linear};
/// # fn main() -> candle_ddp::Result<()> {
/// candle_ddp::spawn(2, |pg| {
///     let options = DdpOptions::default;
///     let encoder = DistributedDataParallel::new(&pg, &VarMap::new(), DType::F32, |vb| linear(8, 2, vb), options())?;
///     let decoder = DistributedDataParallel::new(&pg, &VarMap::new(), DType::F32, |vb| linear(2, 8, vb), options())?;
///     let mut optimizer = SGD::new([encoder.parameters(), decoder.parameters()].concat(), 0.1)?;
///     let x = Tensor::randn(0f32, 1.0, (4, 8), pg.device())?;
///     let loss = (decoder.forward(&encoder.forward(&x)?)? - &x)?.sqr()?.mean_all()?;
///     let grads = candle_ddp::backward(&loss, &[&encoder, &decoder])?;
///     optimizer.step(&grads)?;
/// #   assert!(encoder.parameters().iter().chain(&decoder.parameters()).all(|var| grads.get(var).is_some()));
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
///
/// Otherwise this works like [`DistributedDataParallel::backward`](crate::DistributedDataParallel::backward). Every
/// rank must call it with the same models in the same order. Buckets are sent model by model; in the first pass with
/// these models, the ranks agree on the order in which rank 0's gradients become complete. (Models of different groups
/// are sent in the given order: give the one nearest to the loss first.) A model under
/// [`no_sync`](crate::DistributedDataParallel::no_sync) sends nothing. A variable that belongs to two of the models
/// gets the sum of both gradients.
///
/// # Errors
/// Returns the errors of `DistributedDataParallel::backward`, and [`Error::InvalidArgument`] on all ranks, before any
/// gradient is sent, if ranks gave different models or a different order.
pub fn backward(loss: &Tensor, models: &[&dyn DistributedModel]) -> Result<GradStore> {
    run(loss, &cores(models), None)
}

/// Like [`backward`], but adds the gradients to those in `grads`; see
/// [`DistributedDataParallel::backward_into`](crate::DistributedDataParallel::backward_into).
///
/// # Errors
/// Returns the errors of [`backward`] and of `DistributedDataParallel::backward_into`.
pub fn backward_into(loss: &Tensor, models: &[&dyn DistributedModel], grads: &mut GradStore) -> Result<()> {
    run_into(loss, &cores(models), grads)
}

pub(super) fn cores<'a>(models: &[&'a dyn DistributedModel]) -> Vec<&'a Core> {
    models.iter().map(|model| model.core()).collect()
}

/// Runs a backward pass and adds its gradients to those in `grads`, which are unchanged if it fails.
pub(super) fn run_into(loss: &Tensor, models: &[&Core], grads: &mut GradStore) -> Result<()> {
    if models.iter().any(|model| model.marks().has_local(grads)) {
        let reason = "it holds this rank's own sums, of a backward pass under no_sync. The buckets hold them as well, and \
                      the next synchronised pass averages them: hand on another store, or GradStore::default()";
        return Err(Error::invalid("grads", reason));
    }
    let synchronised: Vec<&Core> = models.iter().copied().filter(|model| model.synchronises()).collect();
    let mut new = run(loss, models, Some(grads))?;
    for (_, var) in models.iter().filter(|model| !contains(&synchronised, model)).flat_map(|model| named(model)) {
        new.remove(var);
    }
    let graph = Graph::of(loss);
    let mut sums = Vec::new();
    for model in &synchronised {
        let mut has_views = model.reducer.is_sharded();
        for (_, var) in named(model) {
            let Some(gradient) = new.remove(var) else { continue };
            has_views |= grads.get(var).is_none();
            sums.push((var.id(), gradient));
        }
        // Sums have memory of their own, so the buckets can be reused.
        let mark = model.marks().take(&mut new).filter(|_| has_views);
        model.marks().take(grads);
        model.marks().put_back(grads, mark);
    }
    // candle also returns gradients of inputs, which would accumulate with every pass.
    let others = new.get_ids().filter(|id| graph.has_variable(**id));
    let others: Vec<_> = others.filter_map(|id| Some((*id, new.get_id(*id)?.clone()))).collect();
    for (id, gradient) in sums.into_iter().chain(others) {
        let sum = match grads.get_id(id) {
            Some(earlier) => (earlier + gradient)?.detach(),
            None => gradient,
        };
        grads.insert_id(id, sum);
    }
    Ok(())
}

/// Runs a backward pass for `models`. `kept` holds the gradients to which the new ones will be added.
pub(super) fn run(loss: &Tensor, models: &[&Core], kept: Option<&GradStore>) -> Result<GradStore> {
    let graph = Graph::of(loss);
    check(&graph, models)?;
    if let Err(error) = check_reached(&graph, models) {
        abort(models.iter().copied().filter(|model| model.synchronises()), &error.to_string());
        return Err(error);
    }
    let synchronised: Vec<&Core> = models.iter().copied().filter(|model| model.synchronises()).collect();
    let joined = announce::announce(&synchronised, kept)?;
    let mut models = models.to_vec();
    if joined.is_some() {
        // Ranks without inputs know no other order.
        models.sort_by_key(|model| announce::place(model));
    }
    in_order(Some(&graph), &models, joined.as_ref(), |models, synchronised, active| {
        run_models(loss, &graph, models, synchronised, kept, active)
    })
}

/// Takes part, with zeros, in a backward pass that the `active` ranks run and this one does not.
pub(super) fn shadow(models: &[&Core], adds_up: bool, active: &Active) -> Result<()> {
    in_order(None, models, Some(active), |models, synchronised, active| {
        let buffers = begin(models, synchronised, |_| adds_up, active)?;
        for model in models {
            model.reducer.launch_remaining()?;
        }
        for model in models {
            model.reducer.finalize_backward()?;
        }
        buffers.into_iter().try_for_each(sync::Broadcast::finish)?;
        synchronised.iter().try_for_each(|model| model.reducer.check_used())
    })
}

/// Runs `pass` with `models` in the order in which all ranks send their buckets, with those that send any, and with the
/// ranks that have inputs. If it fails, the group ends.
fn in_order<T>(
    graph: Option<&Graph>,
    models: &[&Core],
    joined: Option<&Active>,
    pass: impl FnOnce(&[&Core], &[&Core], Option<&Active>) -> Result<T>,
) -> Result<T> {
    let order = order::agree(graph, models, joined.map_or(0, Active::root))?;
    let models: Vec<&Core> = order.into_iter().map(|index| models[index]).collect();
    let is_sent = |model: &&Core| graph.is_none() || model.synchronises();
    let synchronised: Vec<&Core> = models.iter().copied().filter(is_sent).collect();
    // An operation of the model may panic.
    let result = catch_unwind(AssertUnwindSafe(|| pass(&models, &synchronised, joined)));
    let reason = match &result {
        Ok(Ok(_)) => None,
        Ok(Err(error)) => Some(error.to_string()),
        Err(panic) => Some(panic_message(&**panic)),
    };
    if reason.is_none() && !synchronised.is_empty() {
        count_step();
    }
    if let Some(reason) = reason {
        models.iter().for_each(|model| model.reducer.discard());
        // All ranks have this error, after their last collective.
        if !matches!(result, Ok(Err(Error::UnusedParameters { rank: None, .. }))) {
            abort(synchronised.iter().copied(), &format!("backward failed: {reason}"));
        }
    }
    result.unwrap_or_else(|panic| resume_unwind(panic))
}

/// Ends the groups of `models`, whose other ranks wait for this one. In a world of one, the program may try again, with a
/// smaller batch for example.
fn abort<'a>(models: impl Iterator<Item = &'a Core>, reason: &str) {
    models.filter(|model| model.group().world_size() > 1).for_each(|model| model.group().abort(reason));
}

/// Checks that the loss depends on one of `models`, so that no rank trains nothing without a word.
fn check_reached(graph: &Graph, models: &[&Core]) -> Result<()> {
    if models.iter().any(|model| graph.completes(model.reducer.identity()).is_some()) {
        return Ok(());
    }
    for model in models {
        let refused = |(name, _): &(&String, &Var)| !model.options.unused.allows(name);
        let unused: Vec<String> = named(model).filter(refused).map(|(name, _)| name.clone()).collect();
        if !unused.is_empty() {
            let (rank, total) = (Some(model.group().rank()), model.variables.parameters.len());
            return Err(Error::UnusedParameters { rank, unused, total });
        }
    }
    Ok(())
}

/// Checks everything that can be checked before anything is sent.
fn check(graph: &Graph, models: &[&Core]) -> Result<()> {
    if models.is_empty() {
        return Err(Error::invalid("models", "there is none to train: give at least one"));
    }
    for (index, model) in models.iter().enumerate() {
        let first = || model.variables.parameters.first().map_or("", |parameter| &parameter.name);
        if contains(&models[..index], model) {
            return Err(Error::invalid("models", format!("the one with the parameter {} is given twice", first())));
        }
        if model.reducer.identity().is_frozen() {
            let reason = format!(
                "the one with the parameter {} is frozen, by a guard that its `freeze` returned: drop the guard before the \
                 backward pass that trains this model",
                first()
            );
            return Err(Error::invalid("models", reason));
        }
    }
    let identities: Vec<_> = models.iter().map(|model| model.reducer.identity()).collect();
    // The graph also contains the variables behind replicas, which may belong to another model too.
    let own: HashSet<TensorId> =
        models.iter().flat_map(|model| model.variables.shared()).map(|(_, var)| var.id()).collect();
    match graph.foreign_parameter(&identities, &own) {
        Some(parameter) => Err(Error::OtherModelInGraph { parameter: parameter.to_string() }),
        None => Ok(()),
    }
}

fn run_models(
    loss: &Tensor,
    graph: &Graph,
    models: &[&Core],
    synchronised: &[&Core],
    kept: Option<&GradStore>,
    active: Option<&Active>,
) -> Result<GradStore> {
    for model in synchronised {
        warn_of_lost(model, model.marks().is_last_held())?;
    }
    let adds_up = |model: &Core| kept.is_some_and(|kept| model.marks().has_last(kept));
    let buffers = begin(models, synchronised, adds_up, active)?;
    let mut grads = models[0].phase("backward", || {
        let _pass = function::Pass::begin();
        loss.backward()
    })?;
    graph.frozen().for_each(|tensor| drop(grads.remove(tensor)));
    let beside = take_unhooked(&mut grads, models)?;
    for model in models {
        model.reducer.launch_remaining()?;
    }
    let mut inserted = HashSet::new();
    for model in models {
        let gradients = model.phase("wait for buckets", || model.reducer.finalize_backward())?;
        for ((_, var), gradient) in named(model).zip(gradients) {
            let Gradient::Present(mut gradient) = gradient else { continue };
            if !inserted.insert(var.id())
                && let Some(of_another) = grads.remove(var)
            {
                gradient = (of_another + gradient)?.detach();
            }
            grads.insert(var, gradient);
        }
        if contains(synchronised, model) {
            model.marks().put_averaged(&mut grads)?;
            model.first_gradients().come(&model.variables.parameters);
        } else {
            model.marks().put_local(&mut grads)?;
        }
    }
    for broadcast in buffers {
        broadcast.finish()?;
    }
    synchronised.iter().try_for_each(|model| model.reducer.check_used())?;
    models.iter().filter_map(|model| model.reducer.trace()).for_each(|trace| trace.flush());
    match beside {
        None => Ok(grads),
        Some(name) => Err(Error::parameter(
            name,
            "the loss depends on its variable not only through the model: that gradient would not be averaged. Compute \
             with the model's own tensor, in `ddp.call(|model| …)`, or leave the variable to each rank with is_ignored",
        )),
    }
}

/// Begins a backward pass of `models`, and starts to broadcast the buffers of those that are `synchronised`.
fn begin<'a>(
    models: &[&Core],
    synchronised: &[&'a Core],
    adds_up: impl Fn(&Core) -> bool,
    active: Option<&Active>,
) -> Result<Vec<sync::Broadcast<'a>>> {
    let mut successor = None;
    for model in models.iter().rev() {
        if model.reducer.trace().is_some() {
            model.group().measure_spans()?;
        }
        let is_held = model.marks().is_last_held();
        let adds_up = adds_up(model);
        let all = Active::all(model.group().world_size());
        let active = active.unwrap_or(&all);
        if contains(synchronised, model) {
            model.reducer.prepare_for_backward(true, successor, is_held, adds_up, active)?;
            successor = Some(Arc::clone(&model.reducer));
        } else {
            model.reducer.prepare_for_backward(false, None, is_held, adds_up, active)?;
        }
    }
    if let Some(first) = successor {
        first.open()?;
    }
    // The backward pass does not read buffers, so broadcasting them here is hidden behind it.
    let mut buffers = Vec::new();
    for model in synchronised.iter().filter(|model| model.options.broadcast_buffers) {
        let vars = model.variables.buffers.iter().map(|buffer| &buffer.var);
        buffers.push(sync::broadcast(model.reducer.groups(), vars, active.map_or(0, Active::root))?);
    }
    Ok(buffers)
}

/// Removes from `grads` the gradients that do not come through hooks: those of models that compute with the variables
/// themselves. Returns the name of a parameter whose variable the loss uses directly, beside its replica.
fn take_unhooked(grads: &mut GradStore, models: &[&Core]) -> Result<Option<String>> {
    for model in models {
        let unhooked = model.variables.parameters.iter().enumerate().rev().filter(|(_, own)| own.replica().is_none());
        for (index, parameter) in unhooked {
            if let Some(gradient) = grads.remove(&parameter.var) {
                model.reducer.gradient(index, &gradient)?;
            }
        }
    }
    let mut parameters = models.iter().flat_map(|model| named(model));
    let beside = parameters.find(|(_, var)| grads.get(var).is_some()).map(|(name, _)| name.clone());
    for frozen in models.iter().flat_map(|model| &model.variables.frozen) {
        grads.remove(&frozen.var);
    }
    Ok(beside)
}

/// Warns if the program may have expected gradients to accumulate, as in PyTorch.
fn warn_of_lost(model: &Core, is_held: bool) -> Result<()> {
    let lost = model.first_gradients().are_lost(&model.variables.parameters, is_held)?;
    if lost && model.group().rank() == 0 {
        let first = model.variables.parameters.first().map_or("", |parameter| &parameter.name);
        log::warn!(
            "the gradients of the first backward pass of the model with the parameter {first} were dropped, and no variable \
             has changed since. If the program expects them to be added to those of the second pass: `backward` returns \
             the gradients of its own loss, and `ddp.backward_into(&loss, &mut grads)` adds to those of an earlier one. \
             (A skipped step, or one with a learning rate of 0, looks the same.)"
        );
    }
    Ok(())
}

fn named(model: &Core) -> impl Iterator<Item = (&String, &Var)> {
    model.variables.parameters.iter().map(|parameter| (&parameter.name, &parameter.var))
}

fn contains(models: &[&Core], model: &Core) -> bool {
    models.iter().any(|other| std::ptr::eq(*other, model))
}
