//! Training with different numbers of batches: ranks without further batches take part in the others' collectives.
use crate::backend::Purpose;
use crate::ddp::buckets::sync;
use crate::ddp::gradients::scaled;
use crate::ddp::model::DistributedModel;
use crate::ddp::pass::backward;
use crate::ddp::watch::verify;
use crate::goes_with::Feature;
use crate::process_group::{Active, Join, Operation, ProcessGroup};
use crate::state::StateDict;
use crate::warnings::warn_aloud;
use crate::{Error, Result};
use candle_ddp_base::debug_fields;

static JOIN_SYNC: Purpose = Purpose::of("Joined::sync");

/// Options of [`join`]. All ranks must give the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JoinOptions {
    /// Whether sums of gradients are divided by the number of all ranks while some have no inputs left, so that a
    /// rank without inputs counts as one whose gradients are zero. If false, they are divided by the number of ranks
    /// that have inputs. A communication hook divides as it always does. Default: true.
    pub divide_by_initial_world_size: bool,
    /// Whether the first rank that runs out of inputs ends the loops of all ranks: their next `backward` returns
    /// [`Error::InputsExhausted`] before anything is sent. Default: false.
    pub throw_on_early_termination: bool,
}

impl Default for JoinOptions {
    fn default() -> Self {
        Self { divide_by_initial_world_size: true, throw_on_early_termination: false }
    }
}

/// The result of a [`join`].
pub struct Joined<T> {
    /// The value that the closure returned.
    pub value: T,
    /// The rank whose model all ranks have now: the lowest of the ranks that trained longest.
    pub last: usize,
    /// Whether some ranks ran out of inputs before others.
    pub was_uneven: bool,
    group: ProcessGroup,
}

impl<T> Joined<T> {
    /// Gives all ranks the state that `state` has on the rank that trained longest: optimizers, schedules and scalers of
    /// the other ranks did not see the last steps. (PyTorch leaves them behind, and the ranks' models then drift apart.) An
    /// optimizer without momentum has no state, and the optimizer of a [sharded](crate::Sharding) model is
    /// up to date by itself. Every rank must call this; if inputs were even, nothing is sent.
    ///
    /// # Errors
    /// Returns the errors of the group, of [`StateDict::state_dict`] and of [`StateDict::load_state_dict`].
    pub fn sync(&self, state: &mut dyn StateDict) -> Result<()> {
        if !self.was_uneven {
            return Ok(());
        }
        let own = self.group.agree(state.state_dict())?;
        let shared = JOIN_SYNC.during(|| self.group.broadcast_tensors(&own, self.last))?;
        let loaded = if self.group.rank() == self.last { Ok(()) } else { state.load_state_dict(&shared) };
        self.group.agree(loaded)
    }
}

debug_fields!(<T: std::fmt::Debug> Joined<T>: value, last, was_uneven);

/// [`DistributedDataParallel::join`](crate::DistributedDataParallel::join) for several models of one group. Backward
/// passes inside of it may train one of them, or several by [`backward_with`](crate::backward_with).
///
/// # Errors
/// Returns the errors of `DistributedDataParallel::join`, and [`Error::InvalidArgument`] if the models belong to
/// different groups.
pub fn join<T>(
    models: &[&DistributedModel],
    options: JoinOptions,
    body: impl FnOnce() -> Result<T>,
) -> Result<Joined<T>> {
    run(models, options, &mut (), |()| body(), |(), _, _| Ok(false))
}

/// Runs `body`, and then takes part in the operations of the ranks whose bodies have not returned. `shadow` is given each
/// operation first, and says whether it has taken part in it.
pub(crate) fn run<T, C>(
    models: &[&DistributedModel],
    options: JoinOptions,
    context: &mut C,
    body: impl FnOnce(&mut C) -> Result<T>,
    mut shadow: impl FnMut(&mut C, Operation, &Active) -> Result<bool>,
) -> Result<Joined<T>> {
    let group = check(models)?;
    let numbers: Vec<u64> = models.iter().map(|model| model.number).collect();
    verify::same_join(group, format!("{options:?}\nmodels: numbers {numbers:?} of those that were built"))?;
    let guard = group.begin_join(numbers, !options.divide_by_initial_world_size, options.throw_on_early_termination)?;
    let join = &*guard.join;
    let value = group.abort_on_error(|| match body(context) {
        // The end of one rank's inputs has ended all loops: no rank waits for this one.
        Err(error) if join.was_terminated() => Ok(Err(error)),
        result => result.map(Ok),
    })??;
    if !join.was_terminated() {
        if let Err(error) = take_part(group, models, join, context, &mut shadow) {
            if !join.was_terminated() {
                group.abort(&format!("{error:#}"));
            }
            return Err(error);
        }
        let last = join.last().root();
        for model in models {
            let shared = model.variables.shared().map(|(_, var)| var);
            sync::broadcast(model.reducer.groups(), shared, last)?.finish()?;
            // The ranks have made different numbers of steps.
            model.marks().steps.forget();
        }
    }
    // Ranks without inputs have counted nothing.
    models.iter().for_each(|model| model.count_skipped(|skipped| skipped.in_a_row = 0));
    let last = join.last();
    Ok(Joined { value, last: last.root(), was_uneven: last.count() < group.world_size(), group: group.clone() })
}

/// Takes part in the other ranks' operations until no rank has inputs left.
fn take_part<C>(
    group: &ProcessGroup,
    models: &[&DistributedModel],
    join: &Join,
    context: &mut C,
    shadow: &mut impl FnMut(&mut C, Operation, &Active) -> Result<bool>,
) -> Result<()> {
    /// PyTorch warns here as well.
    const MANY: usize = 1000;
    let mut passes = 0;
    while let Some((operation, active)) = group.await_announcement(join)? {
        if shadow(context, operation, &active)? {
            continue;
        }
        match operation {
            Operation::Backward { models: mask, kind } => {
                let chosen = models.iter().enumerate().filter(|(index, _)| (mask >> index) & 1 == 1);
                backward::shadow(&chosen.map(|(_, model)| *model).collect::<Vec<_>>(), kind, &active)?;
                passes += 1;
            }
            Operation::Unscale => {
                scaled::share_verdict(group, [false; 2])?;
            }
            Operation::Step | Operation::ClipGradNorm => {
                let reason = "the optimizer of a sharded model steps inside this join, which does not include it: use the \
                              optimizer's own join, `optimizer.join(&ddp, options, |optimizer| …)`";
                return Err(Error::invalid("join", reason));
            }
        }
        if passes == MANY {
            warn_aloud(format_args!(
                "rank {} ran out of inputs {MANY} backward passes ago, and other ranks are still training: give all \
                 ranks about the same number of batches",
                group.rank()
            ));
        }
    }
    Ok(())
}

/// The group of all models.
fn check<'a>(models: &[&'a DistributedModel]) -> Result<&'a ProcessGroup> {
    let Some(first) = models.first() else {
        return Err(Error::invalid("models", "the list is empty: give at least one model"));
    };
    let group = first.group();
    if models.iter().any(|model| !model.group().is_same(group)) {
        return Err(Error::invalid("models", "all models of a join must belong to the same process group"));
    }
    models.iter().try_for_each(|model| model.check_whole(Feature::Join))?;
    if group.virtual_ranks().is_some() {
        Feature::Join.goes_with(Feature::VirtualRanks)?;
    }
    if models.len() > Operation::MODELS {
        return Err(Error::invalid("models", format!("a join has at most {} models", Operation::MODELS)));
    }
    Ok(group)
}
