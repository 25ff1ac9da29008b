//! Backward passes of one model or of several models in one graph.
use crate::backend::CallSite;
use crate::ddp::blocks::Held;
use crate::ddp::buckets::count;
use crate::ddp::buckets::sync;
use crate::ddp::gradients::left_out;
use crate::ddp::gradients::scaled;
use crate::ddp::model::DistributedModel;
use crate::ddp::pass::Pass;
use crate::ddp::pass::checks::{
    check, check_first_order, check_fresh, check_one_number, check_reached, check_recorded, not_finite,
};
use crate::ddp::pass::graph::Graph;
use crate::ddp::pass::ignored;
use crate::ddp::pass::micro_batch;
use crate::ddp::pass::options::Backward;
use crate::ddp::pass::order::Member;
use crate::ddp::pass::parts::{self, StepPart};
use crate::ddp::pass::settle;
use crate::ddp::reducer::Gradient;
use crate::ddp::watch::first;
use crate::ddp::watch::replicas;
use crate::goes_with::Feature;
use crate::origin;
use crate::panic::lock;
use crate::process_group::{Active, Kind};
use crate::warnings::warn_aloud;
use crate::{Error, Result};
use candle_core::backprop::GradStore;
use candle_core::{Tensor, TensorId, Var};
use std::collections::HashSet;
use std::panic::Location;

/// Computes the gradients of a loss that depends on one or several models in one backward pass, and averages each model's
/// gradients over the ranks of its group: [`DistributedDataParallel::backward`](crate::DistributedDataParallel::backward) in general.
///
/// # Several models
/// Examples are an encoder and a decoder, a generator and a discriminator, or a student and a trained part of its teacher.
///
/// ```
/// # use candle_core::{DType, Module, Tensor};
/// # use candle_ddp::{Backward, DistributedDataParallel, backward_with};
/// # use candle_nn::{Optimizer, SGD, VarMap, linear};
/// # fn main() -> candle_ddp::Result<()> {
/// candle_ddp::spawn(2, |pg| {
///     let encoder = DistributedDataParallel::new(&pg, &VarMap::new(), |vb| linear(8, 2, vb))?;
///     let decoder = DistributedDataParallel::new(&pg, &VarMap::new(), |vb| linear(2, 8, vb))?;
///     let mut optimizer = SGD::new([encoder.parameters(), decoder.parameters()].concat(), 0.1)?;
///     let x = Tensor::randn(0f32, 1.0, (4, 8), pg.device())?;
///     let loss = (decoder.forward(&encoder.forward(&x)?)? - &x)?.sqr()?.mean_all()?;
///     let grads = backward_with(&loss, &[&encoder, &decoder], Backward::default())?;
///     optimizer.step(&grads)?;
/// #   assert!(encoder.parameters().iter().chain(&decoder.parameters()).all(|var| grads.get(var).is_some()));
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
///
/// Every rank must call it with the same models in the same order. Buckets are sent model by model; in the first pass with
/// these models, the ranks agree on the order in which rank 0's gradients become complete. (Models of different
/// groups are sent in the given order: put the one nearest to the loss first.) A model under
/// [`no_sync`](crate::DistributedDataParallel::no_sync) sends nothing, unless it is sharded. A variable that belongs to two of the models
/// gets the sum of both gradients.
///
/// # A sum over samples
/// With [`count`](Backward::count), ranks and micro-batches may have different numbers of samples:
///
/// ```
/// # use candle_core::{D, DType, Tensor};
/// # use candle_ddp::{Backward, DistributedDataParallel, backward_with};
/// # use candle_nn::{VarMap, linear};
/// # fn main() -> candle_ddp::Result<()> {
/// # candle_ddp::spawn(2, |pg| {
/// # let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), |vb| linear(4, 1, vb))?;
/// # let micro_batches = [3, 5].map(|rows| Tensor::ones((rows + pg.rank(), 4), DType::F32, pg.device()).unwrap());
/// # let mut grads = Default::default();
/// for (index, x) in micro_batches.iter().enumerate() {
///     let _guard = ddp.sync_if(index + 1 == micro_batches.len());
///     let loss_sum = ddp.forward(x)?.sqr()?.sum_all()?;
///     let count = Some(x.dim(0)? as f64);
///     grads = backward_with(&loss_sum, &[&ddp], Backward { count, ..Default::default() })?;
/// }
/// # assert!(grads.get(&ddp.parameters()[0]).is_some());
/// # Ok(())
/// # })?;
/// # Ok(())
/// # }
/// ```
///
/// # Several losses before a step
/// With [`into`](Backward::into), the gradients are added to earlier ones:
///
/// ```no_run
/// # use candle_ddp::{Backward, backward_with};
/// # fn step(d: &candle_ddp::DistributedDataParallel<candle_nn::Linear>, real: &candle_core::Tensor, fake: &candle_core::Tensor) -> candle_ddp::Result<()> {
/// # let bce = |x: &candle_core::Tensor, _: f64| x.mean_all();
/// let mut grads = d.backward(&bce(&d.forward(real)?, 1.0)?)?;
/// let of_fake = bce(&d.forward(&fake.detach())?, 0.0)?;
/// backward_with(&of_fake, &[d], Backward { into: Some(&mut grads), ..Default::default() })?;
/// // optimizer.step(&grads)?;
/// # Ok(())
/// # }
/// ```
///
/// # Virtual ranks
/// With [`micro_batch`](Backward::micro_batch), a step is one pass for each micro-batch. The buckets are sent during the last one.
///
/// ```
/// # use candle_core::{DType, Tensor};
/// # use candle_ddp::optim::{Optimizer, ParamsSgd, Sgd};
/// # use candle_ddp::data::{DataLoader, LoaderOptions, TensorDataset};
/// # use candle_ddp::{Backward, DistributedDataParallel, SpawnOptions, backward_with};
/// # use candle_nn::{VarMap, linear};
/// # fn main() -> candle_ddp::Result<()> {
/// # let options = SpawnOptions { world_size: 3, virtual_ranks: Some(8), ..Default::default() };
/// # candle_ddp::spawn_with(options, |pg| {
/// # let data = TensorDataset::new(Tensor::ones((64, 4), DType::F32, pg.device())?)?;
/// // `pg` was made with `InitOptions { virtual_ranks: Some(8), .. }`.
/// let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), |vb| linear(4, 1, vb))?;
/// let mut optimizer = Sgd::new(&ddp, ParamsSgd::default())?;
/// let loader = DataLoader::new(data, &pg, LoaderOptions { batch_size: 4, ..Default::default() })?;
/// for micro_batch in loader.micro_batches()? {
///     let micro_batch = micro_batch?;
///     let loss = ddp.forward(&micro_batch.batch)?.sqr()?.mean_all()?;
///     let options = Backward { micro_batch: Some(micro_batch.number), ..Default::default() };
///     let grads = backward_with(&loss, &[&ddp], options)?;
///     if micro_batch.is_last {
///         optimizer.step(&grads)?;
///     }
/// }
/// # Ok(())
/// # })?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// Returns the errors of `DistributedDataParallel::backward`, and [`Error::InvalidArgument`] on all ranks, before any
/// gradient is sent, if ranks gave different models or a different order.
///
/// With a count: [`Error::NothingCounted`] on every rank if the counts of all ranks add up to 0; the group still works. A count
/// that is negative, infinite or NaN is [`Error::InvalidArgument`] on its rank and ends the group. Micro-batches of one step must
/// all have a count or none of them; if ranks differ in that, the group ends.
///
/// [`Error::InvalidArgument`] for a `micro_batch` without virtual ranks, and under them for none; for another number than the next one, and
/// under [`no_sync`](crate::DistributedDataParallel::no_sync), the group then ends on all ranks.
///
/// [`Error::InvalidArgument`] if `into` holds sums of a pass under `no_sync`, since the buckets hold these too; and, while a
/// [sharded](crate::Sharding) model's optimizer keeps the gradients, for `into` with a count, or with gradients
/// that a step has used.
#[track_caller]
pub fn backward_with(loss: &Tensor, models: &[&DistributedModel], mut options: Backward<'_>) -> Result<GradStore> {
    CallSite::around(Location::caller(), || {
        check_into(models, &mut options)?;
        let mut pass = Pass::new(loss, models, &options);
        let grads = average(loss, &mut pass, None)?;
        match options {
            Backward { into: Some(into), .. } => add(grads, into, &pass),
            Backward { micro_batch: Some(_), .. } => Ok(of_step(grads, &pass)),
            _ => Ok(grads),
        }
    })
}

/// [`backward`](crate::DistributedDataParallel::backward) for a step that follows at once. `step`, if there is one, gets the gradients of the
/// buckets as soon as they are there, unless the step depends on something that is only known at the end. The store has all others.
#[track_caller]
pub(crate) fn backward_in_parts(
    model: &DistributedModel,
    loss: &Tensor,
    step: Option<&mut StepPart>,
) -> Result<GradStore> {
    let mut pass = Pass::new(loss, &[model], &Backward::default());
    parts::check(&pass)?;
    CallSite::around(Location::caller(), || average(loss, &mut pass, step))
}

/// Refuses gradients to which a pass cannot add its own.
fn check_into(models: &[&DistributedModel], options: &mut Backward) -> Result<()> {
    let Some(grads) = &mut options.into else { return Ok(()) };
    left_out::settle_store(grads)?;
    if models.iter().any(|model| model.marks().has_local(grads)) {
        let reason = "it holds this rank's own sums from a backward pass under no_sync. The model holds these sums as \
                      well, and the next synchronised pass averages them: pass another store, or GradStore::default()";
        return Err(Error::invalid("into", reason));
    }
    if models.iter().any(|model| model.group().virtual_ranks().is_some()) {
        Feature::Into.goes_with(Feature::VirtualRanks)?;
    }
    if options.count.is_some() && models.iter().any(|model| model.reducer.is_sharded()) {
        let reason = "the optimizer of a sharded model keeps the gradients, and cannot add those of a pass with a count to earlier \
                      ones: let one pass have the sum of the losses, or use Sharding::Off";
        return Err(Error::invalid("into", reason));
    }
    Ok(())
}

/// Adds the gradients of `pass` to those in `grads`. Returns a store of the same tensors.
fn add(mut new: GradStore, grads: &mut GradStore, pass: &Pass) -> Result<GradStore> {
    if left_out::is_skipped(&new) {
        *grads = copy_of(&new);
        return Ok(new);
    }
    if left_out::is_skipped(grads) {
        return Ok(copy_of(grads));
    }
    for model in pass.models.iter().filter(|model| !model.synchronises) {
        model.core.variables.named_parameters().for_each(|(_, var)| drop(new.remove(var)));
    }
    // candle also returns gradients of inputs, which would accumulate with every pass.
    let mut added: HashSet<TensorId> = pass.graph.iter().flat_map(Graph::variables).collect();
    added.extend(pass.synchronised().flat_map(|model| model.variables.named_parameters()).map(|(_, var)| var.id()));
    let added = new.get_ids().filter(|id| added.contains(id));
    let sum = |(id, gradient): (TensorId, &Tensor)| match grads.get_id(id) {
        Some(earlier) => Ok((id, (earlier + gradient)?.detach())),
        None => Ok((id, gradient.clone())),
    };
    let sums = added.filter_map(|id| Some((*id, new.get_id(*id)?))).map(sum).collect::<Result<Vec<_>>>()?;
    let of_sums: Vec<Tensor> = pass.synchronised().map(|model| model.marks().of_sums()).collect::<Result<_>>()?;
    // From here on, nothing fails.
    for (model, of_sums) in pass.synchronised().zip(of_sums) {
        // Sums have their own memory, so the buckets can be reused.
        let becomes_view = |(_, var): (_, &Var)| new.get(var).is_some() && grads.get(var).is_none();
        let has_views = model.reducer.is_sharded() || model.variables.named_parameters().any(becomes_view);
        let mark = model.marks().take(&mut new).filter(|_| has_views);
        model.marks().take(grads);
        model.marks().put_back(grads, Some(mark.unwrap_or(of_sums)));
    }
    sums.into_iter().for_each(|(id, sum)| drop(grads.insert_id(id, sum)));
    Ok(copy_of(grads))
}

/// A store of the same tensors.
fn copy_of(grads: &GradStore) -> GradStore {
    let mut same = GradStore::default();
    let all = grads.get_ids().filter_map(|id| Some((*id, grads.get_id(*id)?.clone())));
    all.for_each(|(id, gradient)| drop(same.insert_id(id, gradient)));
    same
}

/// Selects what the pass of a micro-batch returns: the gradients of parameters, if it is the last pass of a step. All other gradients
/// belong to this micro-batch alone.
fn of_step(mut all: GradStore, pass: &Pass) -> GradStore {
    if left_out::is_skipped(&all) {
        return all;
    }
    let mut grads = GradStore::default();
    for Member { core: model, .. } in &pass.models {
        for (_, var) in model.variables.named_parameters() {
            if let Some(gradient) = all.remove(var) {
                grads.insert(var, gradient);
            }
        }
        let mark = model.marks().take(&mut all);
        model.marks().put_back(&mut grads, mark);
    }
    scaled::pass_on(&mut all, &mut grads);
    grads
}

/// Runs `pass`, which begins at `loss`, and returns the averaged gradients, except for those that `step` gets before.
fn average(loss: &Tensor, pass: &mut Pass, step: Option<&mut StepPart>) -> Result<GradStore> {
    origin::trains();
    check(pass)?;
    let counted = pass.count.map_or(Ok(()), count::check);
    let checked = counted.and_then(|()| micro_batch::check(pass)).and_then(|()| check_one_number(loss, pass));
    let checked = checked
        .and_then(|()| check_recorded(loss, pass))
        .and_then(|()| check_first_order(pass))
        .and_then(|()| check_reached(pass))
        .and_then(|()| check_fresh(pass))
        .and_then(|()| check_sharded(pass));
    checked.inspect_err(|error| pass.abort(&error.to_string()))?;
    pass.loss = not_finite(loss, pass)?;
    pass.announce()?;
    let blocks: Vec<_> =
        pass.models.iter().filter_map(|model| Some((model.core, model.core.blocks.as_ref()?))).collect();
    let averaged = pass.run(|pass| {
        pass.begin()?;
        pass.synchronised().try_for_each(warn_of_lost)?;
        for (model, blocks) in &blocks {
            let of_model = |graph: &Graph| graph.blocks(model.reducer.identity(), &blocks.owners);
            blocks.units.begin_backward(&pass.graph.as_ref().map(of_model).unwrap_or_default())?;
        }
        let _held = hold_others(pass)?;
        let mut grads = pass.models[0].core.phase("backward", || loss.backward())?;
        pass.graph.iter().flat_map(Graph::frozen).for_each(|tensor| drop(grads.remove(tensor)));
        let beside = take_unhooked(&mut grads, pass)?;
        micro_batch::computed(pass)?;
        for model in &pass.models {
            model.core.reducer.launch_remaining()?;
        }
        let buffers = broadcast_buffers(pass)?;
        match step.filter(|_| beside.is_none() && parts::has_parts(pass)) {
            Some(step) => parts::step(pass, step)?,
            None => collect(&mut grads, pass)?,
        }
        pass.synchronised().for_each(|model| model.reducer.identity().has_gradients());
        finish(buffers, pass)?;
        ignored::look(pass, Some(&grads))?;
        micro_batch::end(pass)?;
        if !settle::settle(pass, &mut grads)? {
            // Without replicas, changes of variables cannot be detected.
            let models = pass.synchronised().filter(|model| model.blocks.is_none());
            models.for_each(|model| _ = lock(&model.first).get_or_insert(!model.has_replicas()));
        }
        replicas::compare_all(pass)?;
        if pass.micro_batch.is_none() {
            let rank = |model: &DistributedModel| model.group().rank();
            pass.models.iter().for_each(|model| lock(&model.core.window).pass(model.synchronises, rank(model.core)));
        }
        pass.models.iter().filter_map(|model| model.core.reducer.trace()).for_each(|trace| trace.flush());
        match beside {
            None => {
                put_marks(&mut grads, pass)?;
                Ok(grads)
            }
            Some(name) => Err(Error::parameter(
                name,
                "the loss also uses its variable directly, not only through the model, and that gradient would not be \
                 averaged: compute with the model's own tensor, in `ddp.call(|model| …)`, or leave the variable to \
                 each rank with Role::Ignored",
            )),
        }
    });
    blocks.iter().for_each(|(_, blocks)| blocks.units.end());
    averaged
}

/// Gathers what gradients need that flow through sharded models which are not trained here, and whose parameters may be freed: another
/// backward pass or an evaluation may have come in between.
fn hold_others(pass: &Pass) -> Result<Vec<Held>> {
    let models: Vec<_> = pass.models.iter().map(|model| model.core.reducer.identity()).collect();
    let others = pass.graph.iter().flat_map(|graph| graph.other_sharded(&models));
    let held = others.map(|units| units.hold_for_backward()).collect::<Result<Vec<_>>>()?;
    Ok(held.into_iter().flatten().collect())
}

/// Under sharding, only the model's optimizer can use the gradients.
fn check_sharded(pass: &Pass) -> Result<()> {
    match pass.models.iter().find(|model| model.core.reducer.lacks_optimizer()) {
        Some(model) => {
            let reason = format!(
                "the model with the parameter {} is sharded, so that each rank gets its part of the gradients: make its optimizer, such as \
                 AdamW::new(&ddp, …), before the first backward pass, and keep it",
                model.core.first_name()
            );
            Err(Error::invalid("sharding", reason))
        }
        None => Ok(()),
    }
}

/// Takes part, with zeros, in a backward pass that the `active` ranks run and this one does not.
pub(in crate::ddp) fn shadow(models: &[&DistributedModel], kind: Kind, active: &Active) -> Result<()> {
    Pass::shadow(models, kind, active).run(|pass| {
        pass.begin()?;
        for model in &pass.models {
            model.core.reducer.launch_remaining()?;
        }
        let buffers = broadcast_buffers(pass)?;
        for model in &pass.models {
            model.core.reducer.finalize_backward()?;
        }
        finish(buffers, pass)?;
        ignored::look(pass, None)
    })
}

/// Starts to broadcast the buffers, once candle's backward pass is over: an `nn::checkpoint` in it runs its forward pass
/// again, which changes them. The wait for the last buckets hides the broadcast.
fn broadcast_buffers<'a>(pass: &Pass<'a>) -> Result<Vec<sync::Broadcast<'a>>> {
    let models = pass.synchronised().filter(|model| model.options.broadcast_buffers);
    let broadcast = |model: &'a DistributedModel| {
        let vars = model.variables.buffers.iter().map(|buffer| &buffer.var);
        sync::broadcast(model.reducer.groups(), vars, pass.root())
    };
    models.map(broadcast).collect()
}

/// Waits for the buckets of all models, and puts their gradients into `grads`.
fn collect(grads: &mut GradStore, pass: &Pass) -> Result<()> {
    let mut inserted = HashSet::new();
    for Member { core: model, .. } in &pass.models {
        let gradients = model.phase("wait for buckets", || model.reducer.finalize_backward())?;
        for ((_, var), gradient) in model.variables.named_parameters().zip(gradients) {
            let Gradient::Present(mut gradient) = gradient else { continue };
            if !inserted.insert(var.id())
                && let Some(of_another) = grads.remove(var)
            {
                gradient = (of_another + gradient)?.detach();
            }
            grads.insert(var, gradient);
        }
    }
    Ok(())
}

/// Marks `grads` as the gradients of a pass that has succeeded.
fn put_marks(grads: &mut GradStore, pass: &Pass) -> Result<()> {
    pass.models.iter().try_for_each(|Member { core, synchronises, .. }| match synchronises {
        true => core.marks().put_averaged(grads),
        false => core.marks().put_local(grads, pass.micro_batch.is_some()),
    })
}

/// Finishes the buffers' broadcasts, and checks the counts and the used flags, once the gradients are there.
fn finish(buffers: Vec<sync::Broadcast>, pass: &Pass) -> Result<()> {
    buffers.into_iter().try_for_each(sync::Broadcast::finish)?;
    pass.synchronised().try_for_each(|model| model.reducer.check_result())
}

/// Removes from `grads` the gradients that do not come through hooks, because their models compute with the variables
/// themselves. Returns the name of a parameter whose variable the loss uses directly, in addition to its replica.
fn take_unhooked(grads: &mut GradStore, pass: &Pass) -> Result<Option<String>> {
    let models = || pass.models.iter().map(|model| model.core);
    for model in models() {
        let unhooked = model.variables.parameters.iter().enumerate().rev().filter(|(_, own)| own.replica().is_none());
        for (index, parameter) in unhooked {
            if let Some(gradient) = grads.remove(&parameter.var) {
                model.reducer.gradient(index, &gradient)?;
            }
        }
    }
    let mut parameters = models().flat_map(|model| model.variables.named_parameters());
    let beside = parameters.find(|(_, var)| grads.get(var).is_some()).map(|(name, _)| name.clone());
    for frozen in models().flat_map(|model| &model.variables.frozen) {
        grads.remove(&frozen.var);
    }
    Ok(beside)
}

/// Warns if the program may have expected gradients to accumulate, as in PyTorch: its training would be wrong without a sign.
fn warn_of_lost(model: &DistributedModel) -> Result<()> {
    let (is_held, mut used) = (model.marks().is_last_held(), lock(&model.first));
    if model.marks().steps.take_left_out()? {
        // The next ones count.
        used.take_if(|used| !*used);
        return Ok(());
    }
    first::look(&mut used, &model.variables.parameters)?;
    let was_unused = used.as_mut().is_some_and(|used| !std::mem::replace(used, true));
    if was_unused && !is_held && model.group().rank() == 0 {
        let first = model.first_name();
        warn_aloud(format_args!(
            "the gradients of the first backward pass of the model with the parameter {first} were dropped, and no variable \
             has changed since. If the program expects them to be added to those of the second pass: `backward` returns \
             the gradients of its own loss, and `backward_with` with `Backward {{ into: Some(&mut grads), .. }}` adds to those of an earlier one. \
             (A skipped step, one with a learning rate of 0, or an optimizer without this parameter looks the same.)"
        ));
    }
    Ok(())
}
