//! Divides the gradients of a step by the scale, and learns whether any rank has an overflow.
use super::options::MIN_SCALE;
use super::{GradScaler, STEPPED, Stage, has_sunk, misuse};
use crate::amp::unscale::{Known, unscale, unscale_on_gpu, unscale_others};
use crate::ddp::gradients::steps::Steps;
use crate::ddp::gradients::verdict::Verdict;
use crate::ddp::{first_kept, gradients::scaled};
use crate::process_group::Operation;
use crate::tensor::finite::non_finite;
use crate::{Error, Result};
use candle_core::backprop::GradStore;
use candle_core::{TensorId, Var};
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl GradScaler {
    /// Divides all gradients in `grads` by the scale, the parameters' in place, and checks whether any of the parameters' is infinite
    /// or NaN on any rank: PyTorch's `unscale_`. Use it to inspect or clip gradients before [`step`](Self::step), which
    /// otherwise does this itself. Call it after all gradients have been accumulated.
    ///
    /// # Errors
    /// Returns [`Error::GradScaler`] for a second call in the same step, and on every rank if none has called
    /// [`scale`](Self::scale) in this step; [`Error::Parameter`] for gradients in f16, which cannot hold the divided
    /// values; [`Error::InvalidArgument`] for gradients that the optimizer of a [sharded](crate::Sharding) model
    /// keeps, whose own [`unscale`](crate::optim::Optimizer::unscale) divides them.
    pub fn unscale(&mut self, grads: &mut GradStore) -> Result<()> {
        self.unscale_with(grads, std::iter::empty())
    }

    /// Like [`unscale`](Self::unscale), also for the gradients of `more` parameters, which the scaler may not know.
    pub(crate) fn unscale_with<'a>(
        &mut self,
        grads: &mut GradStore,
        more: impl Iterator<Item = (&'a String, &'a Var)> + Clone,
    ) -> Result<()> {
        if self.unscale_on_gpu(grads, more.clone())? {
            return Ok(());
        }
        self.unscale_parameters(grads, more, None, |_, overflow| {
            let reason = "it has no gradient for any of the scaler's parameters: for a sharded model, \
                          call `scaler.step(&mut optimizer, &mut grads)`, or `optimizer.unscale(&mut scaler, &mut \
                          grads)` first";
            overflow.ok_or_else(|| Error::invalid("grads", reason))
        })
    }

    /// Like [`unscale`](Self::unscale), for the model with the parameter `kept`, whose averaged gradients are not in `grads`: `divide`
    /// gets the factor by which to multiply them, and returns whether any of this rank's is infinite or NaN.
    pub(crate) fn unscale_sharded(
        &mut self,
        grads: &mut GradStore,
        kept: Option<&Var>,
        divide: impl FnOnce(f64) -> Result<bool>,
    ) -> Result<()> {
        let verdict = |factor, overflow| Ok(divide(factor)? || overflow == Some(true));
        self.unscale_parameters(grads, std::iter::empty(), kept, verdict)
    }

    /// `verdict` gets the factor and whether `grads` has infinities or NaNs, and returns whether there are any at all.
    fn unscale_parameters<'a>(
        &mut self,
        grads: &mut GradStore,
        more: impl Iterator<Item = (&'a String, &'a Var)>,
        kept: Option<&Var>,
        verdict: impl FnOnce(f64, Option<bool>) -> Result<bool>,
    ) -> Result<()> {
        let (parameters, models) = (std::mem::take(&mut self.parameters), Steps::of(grads));
        let known = known(&parameters, &models, more);
        let result = self.unscale_by(|factor| {
            check_kept(grads, &known, models.iter().find(|model| kept.is_some_and(|var| model.has(var))))?;
            let is_bad = verdict(factor, unscale(&known, grads, factor)?)?;
            unscale_others(grads, factor, is_done(&known, &models))?;
            Ok(is_bad)
        });
        drop(known);
        self.parameters = parameters;
        self.note_overflow(matches!(result, Ok(false)), grads);
        result?;
        scaled::unmark(grads);
        Ok(())
    }

    /// `divide` gets the factor by which to multiply the gradients, and returns whether any of this rank's is infinite or NaN.
    fn unscale_by(&mut self, divide: impl FnOnce(f64) -> Result<bool>) -> Result<bool> {
        if !self.options.enabled {
            return Ok(true);
        }
        self.settle()?;
        match self.stage {
            Stage::Scaled => {}
            Stage::Unscaled(_) => {
                return Err(misuse("unscale", "it was already called in this step, for all parameters"));
            }
            Stage::Stepped(_) => return Err(misuse("unscale", STEPPED)),
        }
        let here = divide(self.factor());
        // A rank that fails here still takes part, so that the others do not wait for it.
        let (overflow, has_scaled) = (!matches!(here, Ok(false)), self.has_scaled.load(Ordering::Relaxed));
        self.group.announce(Operation::Unscale)?;
        let [overflow, has_scaled] = scaled::share_verdict(&self.group, [overflow, has_scaled])?;
        here?;
        if !has_scaled {
            return Err(misuse(
                "unscale",
                "no loss was scaled in this step: call `ddp.backward(&scaler.scale(&loss)?)`",
            ));
        }
        self.stage = Stage::Unscaled(Verdict::known(overflow));
        Ok(!overflow)
    }

    /// Divides gradients of one GPU, whose verdict the host need not know yet. Returns false, and nothing happens, where the host must divide
    /// them, or find the one that overflowed.
    fn unscale_on_gpu<'a>(
        &mut self,
        grads: &mut GradStore,
        more: impl Iterator<Item = (&'a String, &'a Var)>,
    ) -> Result<bool> {
        if !self.options.enabled || !self.is_scaled() || !self.has_scaled.load(Ordering::Relaxed) {
            return Ok(false);
        }
        self.settle()?;
        let models = Steps::of(grads);
        let known = known(&self.parameters, &models, more);
        if self.would_sink() || check_kept(grads, &known, None).is_err() {
            return Ok(false);
        }
        let Some(numbers) = unscale_on_gpu(&known, grads, self.factor())? else { return Ok(false) };
        self.group.announce(Operation::Unscale)?;
        let verdict = Verdict::of_all_ranks(&self.group, numbers)?;
        unscale_others(grads, self.factor(), is_done(&known, &models))?;
        scaled::unmark(grads);
        models.iter().for_each(|model| model.leave_out_if_bad(&verdict));
        self.stage = Stage::Unscaled(verdict);
        Ok(true)
    }

    /// This step's verdict, for kernels that do nothing if it is bad.
    pub(crate) fn verdict_on_gpu(&self) -> Option<Arc<Verdict>> {
        let Stage::Unscaled(verdict) = &self.stage else { return None };
        verdict.numbers().map(|_| Arc::clone(verdict))
    }

    /// Call once such kernels are launched.
    pub(crate) fn has_stepped(&mut self, verdict: Arc<Verdict>) {
        self.stage = Stage::Stepped(verdict);
    }

    /// As in PyTorch: the reciprocal in f64, rounded to f32.
    fn factor(&self) -> f64 {
        f64::from((1.0 / self.scale) as f32)
    }

    /// Tells the models that the step with `grads` is left out if there is an `overflow`, and finds the first parameter whose gradient
    /// overflowed if that will be said.
    fn note_overflow(&mut self, overflow: bool, grads: &GradStore) {
        if !overflow {
            return;
        }
        let models = Steps::of(grads);
        models.iter().for_each(|model| model.leave_out());
        if self.group.rank() == 0 && self.would_sink() {
            self.overflowed = first_overflow(&known(&self.parameters, &models, std::iter::empty()), grads);
        }
    }

    /// Whether an overflow would let the scale fall so low that this must be said.
    fn would_sink(&self) -> bool {
        has_sunk(self.scale, (self.scale * self.options.backoff_factor).max(MIN_SCALE))
    }

    /// Whether this step's gradients have not been divided yet.
    pub(crate) fn is_scaled(&self) -> bool {
        matches!(self.stage, Stage::Scaled)
    }
}

/// The scaler's `parameters`, those of the `models` whose gradients are in the store, and `more`.
fn known<'a, 'more: 'a>(
    parameters: &'a [(String, Var)],
    models: &'a [Arc<Steps>],
    more: impl Iterator<Item = (&'more String, &'more Var)>,
) -> Vec<(&'a String, &'a Var)> {
    let own = parameters.iter().map(|(name, var)| (name, var));
    let mut all: Vec<_> = own.chain(models.iter().flat_map(|model| model.named())).collect();
    for of_more in more {
        all.push(of_more);
    }
    let mut seen = HashSet::new();
    all.retain(|(_, var)| seen.insert(var.id()));
    all
}

/// The entries of a store that are no gradients, or gradients of `known` variables.
fn is_done(known: &Known, models: &[Arc<Steps>]) -> impl Fn(TensorId) -> bool + use<> {
    let marks = models.iter().map(|model| model.mark.id());
    let ids: HashSet<TensorId> = known.iter().map(|(_, var)| var.id()).chain(marks).collect();
    move |id| ids.contains(&id) || scaled::is_key(id)
}

/// Refuses gradients that are not in `grads`, since the optimizer of a sharded model keeps them, except for those of `own`.
fn check_kept(grads: &GradStore, known: &Known, own: Option<&Arc<Steps>>) -> Result<()> {
    let others = known.iter().map(|(_, var)| *var).filter(|var| own.is_none_or(|own| !own.has(var)));
    let Some(name) = first_kept(grads, others) else { return Ok(()) };
    let reason = format!(
        "the optimizer of a sharded model keeps the gradient of {name}, and divides it itself: call `scaler.step(&mut optimizer, &mut grads)`, or \
         `optimizer.unscale(&mut scaler, &mut grads)` first (a scaler serves one such optimizer)"
    );
    Err(Error::invalid("grads", reason))
}

/// The first parameter whose gradient is not finite.
fn first_overflow(parameters: &Known, grads: &GradStore) -> Option<String> {
    let overflows = |var: &Var| grads.get(var).is_some_and(|gradient| matches!(non_finite(gradient), Ok(Some(_))));
    parameters.iter().find(|(_, var)| overflows(var)).map(|(name, _)| (*name).clone())
}
