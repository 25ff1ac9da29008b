//! Scales losses, and skips steps that overflow.
use super::unscale::{Known, unscale, unscale_on_gpu, unscale_others};
use super::verdict::Verdict;
use crate::ddp::gradients::steps::Steps;
use crate::ddp::{first_kept, gradients::scaled};
use crate::process_group::{Operation, ProcessGroup};
use crate::state::StateDict;
use crate::state::{self, Loader};
use crate::tensor::finite::non_finite;
use crate::variables::Parameters;
use crate::warnings::warn_aloud;
use crate::{Error, Result};
use candle_core::backprop::GradStore;
use candle_core::{Tensor, TensorId, Var};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The smallest scale: f32, in which losses and gradients are multiplied, has both it and its reciprocal as normal numbers.
const MIN_SCALE: f64 = f32::MIN_POSITIVE as f64;

/// Options of a [`GradScaler`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradScalerOptions {
    /// The initial scale, from 1.2e-38 to 3.4e38, which f32 can carry. Default: 65536.
    pub init_scale: f64,
    /// The factor by which the scale grows after `growth_interval` steps without overflow; with 1 it never grows.
    /// Default: 2.
    pub growth_factor: f64,
    /// The factor by which the scale shrinks after an overflow, but not below 1.2e-38; with 1 it never shrinks.
    /// Default: 0.5.
    pub backoff_factor: f64,
    /// The number of consecutive steps without overflow before the scale grows. Default: 2000.
    pub growth_interval: usize,
    /// If false, the scaler does nothing: it leaves losses and gradients unchanged, and skips no step. Default: true.
    pub enabled: bool,
}

impl Default for GradScalerOptions {
    fn default() -> Self {
        Self { init_scale: 65536.0, growth_factor: 2.0, backoff_factor: 0.5, growth_interval: 2000, enabled: true }
    }
}

impl GradScalerOptions {
    /// `scale` is the name of `init_scale` in errors.
    fn check(&self, scale: &'static str) -> Result<()> {
        let refuse =
            |argument, value: f64, rule| Err(Error::invalid(argument, format!("it must be {rule}, not {value}")));
        if !(MIN_SCALE..=f64::from(f32::MAX)).contains(&self.init_scale) {
            return refuse(scale, self.init_scale, "from 1.2e-38 to 3.4e38, which f32 can carry");
        }
        if !(self.growth_factor >= 1.0 && self.growth_factor.is_finite()) {
            return refuse("growth_factor", self.growth_factor, "at least 1 and finite");
        }
        if !(self.backoff_factor > 0.0 && self.backoff_factor <= 1.0) {
            return refuse("backoff_factor", self.backoff_factor, "above 0 and at most 1");
        }
        if self.growth_interval == 0 {
            return Err(Error::invalid("growth_interval", "it must be at least 1, not 0"));
        }
        Ok(())
    }
}

/// Multiplies losses by a scale, so that small gradients do not vanish in f16, and divides the gradients by it again.
/// If gradients overflow, all ranks skip the step. PyTorch's `GradScaler`.
///
/// ```
/// use candle_ddp::amp::{Autocast, GradScaler, GradScalerOptions};
/// use candle_ddp::nn::linear;
/// use candle_ddp::{DdpOptions, Precision, prelude::*};
///
/// fn main() -> Result<()> {
///     candle_ddp::spawn(2, |pg| {
///         let precision = Precision::Autocast(Autocast::Lists(DType::F16));
///         let options = DdpOptions { precision, ..Default::default() };
///         let ddp = DistributedDataParallel::with_options(&pg, &VarMap::new(), |vb| linear(4, 1, vb), options)?;
///         let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default())?;
///         let mut scaler = GradScaler::new(&pg, &ddp, GradScalerOptions::default())?;
///         for step in 0..8 {
///             let x = Tensor::randn(0f32, 1., (8, 4), pg.device())?;
///             let loss = (ddp.forward(&x)?.to_dtype(DType::F32)?.sqr()?.mean_all()? / 4.)?; // a step of 4 batches
///             let is_last = step % 4 == 3;
///             let _unsynchronised = ddp.sync_if(is_last); // nothing is sent before the last batch
///             let mut grads = ddp.backward(&scaler.scale(&loss)?)?;
///             if is_last {
///                 optimizer.unscale(&mut scaler, &mut grads)?; // so that clipping sees the gradients themselves
///                 optimizer.clip_grad_norm(&mut grads, 1.)?;
///                 scaler.step(&mut optimizer, &mut grads)?; // skipped on all ranks if a gradient is not finite
///                 scaler.update()?;
///             }
///         }
///         Ok(())
///     })?;
///     Ok(())
/// }
/// ```
/// In each training step, call [`scale`](Self::scale), then [`unscale`](Self::unscale) if the program inspects or clips
/// the gradients, then [`step`](Self::step) and [`update`](Self::update), the same on all ranks. An overflow on one
/// rank counts for all.
///
/// Several optimizers may share a scaler. They step together, in one
/// [`step_if_finite`](Self::step_if_finite), which divides all gradients at once; a second `step` before `update` (PyTorch's
/// way, one per optimizer) is refused. An overflow skips the step of all optimizers, where PyTorch decides for each.
///
/// Save and load it like an optimizer, through [`StateDict`](crate::checkpoint::StateDict).
pub struct GradScaler {
    group: ProcessGroup,
    parameters: Vec<(String, Var)>,
    options: GradScalerOptions,
    scale: f64,
    /// Steps without overflow since the scale last changed.
    clean_steps: usize,
    stage: Stage,
    /// Whether a loss was scaled in this step.
    has_scaled: AtomicBool,
    /// The first parameter whose gradient overflowed, if it is known: it is looked for only when the scale is about to sink below 1.
    overflowed: Option<String>,
}

/// The progress of a training step. `overflow` says whether any rank found an infinity or NaN.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stage {
    Scaled,
    Unscaled { overflow: bool },
    Stepped { overflow: bool },
}

impl std::fmt::Debug for GradScaler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GradScaler")
            .field("parameters", &self.parameters.len())
            .field("options", &self.options)
            .field("scale", &self.scale)
            .field("clean_steps", &self.clean_steps)
            .field("stage", &self.stage)
            .finish_non_exhaustive()
    }
}

impl GradScaler {
    /// A scaler for the gradients of `parameters`, such as a `&DistributedDataParallel`, which the ranks of `group` use
    /// together. It also knows the parameters of an optimizer that it steps, and of every DDP model whose gradients are in the
    /// store, such as one that was made anew with thawed parameters. A program that steps yet other variables, in
    /// [`step_if_finite`](Self::step_if_finite), must give them here: their gradients are divided, but an overflow in them skips no step.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for a scale that f32 cannot carry, a growth factor that is below 1
    /// or not finite, a backoff factor that is not above 0 or is above 1, or a growth interval of 0.
    pub fn new(group: &ProcessGroup, parameters: impl Into<Parameters>, options: GradScalerOptions) -> Result<Self> {
        let mut seen: HashSet<TensorId> = HashSet::new();
        let parameters = parameters.into().into_iter().filter(|(_, var)| seen.insert(var.id())).collect();
        options.check("init_scale")?;
        let (scale, stage) = (options.init_scale, Stage::Scaled);
        let has_scaled = AtomicBool::new(false);
        Ok(Self {
            group: group.clone(),
            parameters,
            options,
            scale,
            clean_steps: 0,
            stage,
            has_scaled,
            overflowed: None,
        })
    }

    /// Returns `loss` times the scale, at least in f32; pass it to `backward`.
    ///
    /// The gradients are known to be scaled: until [`unscale`](Self::unscale) has divided them, clipping and the optimizers of
    /// [`optim`](crate::optim) refuse them.
    ///
    /// # Errors
    /// candle's error if the loss cannot be converted to f32.
    pub fn scale(&self, loss: &Tensor) -> Result<Tensor> {
        if !self.options.enabled {
            return Ok(loss.clone());
        }
        let dtype = crate::tensor::accumulator(loss.dtype());
        self.has_scaled.store(true, Ordering::Relaxed);
        Ok(scaled::mark(&(loss.to_dtype(dtype)? * self.scale)?)?)
    }

    /// Divides all gradients in `grads` by the scale, the parameters' in place, and checks whether any of the parameters' is infinite
    /// or NaN on any rank: PyTorch's `unscale_`. Use it to inspect or clip gradients before [`step`](Self::step), which
    /// otherwise does this itself. Call it after all gradients have been accumulated.
    ///
    /// Returns whether all gradients are finite.
    ///
    /// # Errors
    /// Returns [`Error::GradScaler`] for a second call in the same step, and on every rank if none has called
    /// [`scale`](Self::scale) in this step; [`Error::Parameter`] for gradients in f16, which cannot hold the divided
    /// values; [`Error::InvalidArgument`] for gradients that the optimizer of a [sharded](crate::Sharding) model
    /// keeps, whose own [`unscale`](crate::optim::Optimizer::unscale) divides them.
    pub fn unscale(&mut self, grads: &mut GradStore) -> Result<bool> {
        self.unscale_with(grads, std::iter::empty())
    }

    /// Like [`unscale`](Self::unscale), also for the gradients of `more` parameters, which the scaler may not know.
    pub(crate) fn unscale_with<'a>(
        &mut self,
        grads: &mut GradStore,
        more: impl Iterator<Item = (&'a String, &'a Var)>,
    ) -> Result<bool> {
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
    ) -> Result<bool> {
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
    ) -> Result<bool> {
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
        if result.is_ok() {
            scaled::unmark(grads);
        }
        result
    }

    /// `divide` gets the factor by which to multiply the gradients, and returns whether any of this rank's is infinite or NaN.
    fn unscale_by(&mut self, divide: impl FnOnce(f64) -> Result<bool>) -> Result<bool> {
        if !self.options.enabled {
            return Ok(true);
        }
        match self.stage {
            Stage::Scaled => {}
            Stage::Unscaled { .. } => {
                return Err(misuse("unscale", "it was already called in this step, for all parameters"));
            }
            Stage::Stepped { .. } => return Err(misuse("unscale", STEPPED)),
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
        self.stage = Stage::Unscaled { overflow };
        Ok(!overflow)
    }

    /// Divides the gradients for a [`step`](Self::step) of an optimizer that launches its kernels with the verdict: they do nothing if it is
    /// bad, and the host learns of it while they run, in [`conclude`](Self::conclude). `None`, and nothing happens, where the host must
    /// decide. `more` as in [`unscale_with`](Self::unscale_with).
    pub(crate) fn judge_on_gpu<'a>(
        &self,
        grads: &mut GradStore,
        more: impl Iterator<Item = (&'a String, &'a Var)>,
    ) -> Result<Option<Verdict>> {
        let has_scaled = self.has_scaled.load(Ordering::Relaxed);
        if !self.options.enabled || self.stage != Stage::Scaled || !has_scaled {
            return Ok(None);
        }
        let models = Steps::of(grads);
        let known = known(&self.parameters, &models, more);
        if check_kept(grads, &known, None).is_err() {
            return Ok(None);
        }
        let Some(numbers) = unscale_on_gpu(&known, grads, self.factor())? else { return Ok(None) };
        self.group.announce(Operation::Unscale)?;
        let verdict = Verdict::of_all_ranks(&self.group, numbers)?;
        unscale_others(grads, self.factor(), is_done(&known, &models))?;
        scaled::unmark(grads);
        Ok(Some(verdict))
    }

    /// Call once the kernels of the step are launched. Returns whether they make one.
    pub(crate) fn conclude(&mut self, grads: &GradStore, verdict: &Verdict, stepped: Result<()>) -> Result<bool> {
        let overflow = verdict.is_bad()?;
        self.stage = Stage::Unscaled { overflow };
        self.note_overflow(overflow, grads);
        stepped?;
        self.stage = Stage::Stepped { overflow };
        Ok(!overflow)
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

    /// Whether an overflow would let the scale fall below 1.
    fn would_sink(&self) -> bool {
        self.scale >= 1.0 && self.scale * self.options.backoff_factor < 1.0
    }

    /// Whether this step's gradients have not been divided yet.
    pub(crate) fn is_scaled(&self) -> bool {
        self.stage == Stage::Scaled
    }

    /// Like [`step`](Self::step), for several optimizers, and for those that do not implement
    /// [`Optimizer`](crate::optim::Optimizer), such as candle's own: calls `step` if all gradients are finite on all
    /// ranks.
    ///
    /// ```
    /// # use candle_core::backprop::GradStore;
    /// # use candle_ddp::{Result, amp::GradScaler, optim::Optimizer};
    /// # fn two(scaler: &mut GradScaler, encoder: &mut impl Optimizer, decoder: &mut impl Optimizer, grads: &mut GradStore) -> Result<()> {
    /// scaler.step_if_finite(grads, |grads| {
    ///     encoder.step(grads)?;
    ///     decoder.step(grads)
    /// })?;
    /// scaler.update()?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The errors of [`unscale`](Self::unscale), if it was not called before, and of `step`; [`Error::GradScaler`] for a second call before
    /// [`update`](Self::update).
    pub fn step_if_finite(
        &mut self,
        grads: &mut GradStore,
        step: impl FnOnce(&GradStore) -> Result<()>,
    ) -> Result<bool> {
        if !self.options.enabled {
            step(grads)?;
            return Ok(true);
        }
        if self.stage == Stage::Scaled {
            self.unscale(grads)?;
        }
        let Stage::Unscaled { overflow } = self.stage else {
            return Err(misuse("step", STEPPED));
        };
        if !overflow {
            step(grads)?;
        }
        self.stage = Stage::Stepped { overflow };
        Ok(!overflow)
    }

    /// Ends a training step: the scale shrinks after an overflow, and grows after `growth_interval` steps without
    /// one. If it falls below 1, training has stalled, and rank 0 warns, again when it reaches the smallest scale that
    /// f32 can carry.
    ///
    /// # Errors
    /// Returns [`Error::GradScaler`] if neither `unscale` nor `step` was called in this step.
    pub fn update(&mut self) -> Result<()> {
        if !self.options.enabled {
            return Ok(());
        }
        let (Stage::Unscaled { overflow } | Stage::Stepped { overflow }) = self.stage else {
            return Err(misuse("update", "neither `unscale` nor `step` was called in this step"));
        };
        self.stage = Stage::Scaled;
        self.has_scaled = AtomicBool::new(false);
        if overflow {
            let before = self.scale;
            self.scale = (before * self.options.backoff_factor).max(MIN_SCALE);
            self.clean_steps = 0;
            let has_sunk = |limit: f64| before >= limit && self.scale < limit;
            let overflowed =
                self.overflowed.take().map_or(String::new(), |name| format!(" (first the gradient of {name})"));
            if self.group.rank() == 0 && (has_sunk(1.0) || has_sunk(2.0 * MIN_SCALE)) {
                warn_aloud(format_args!(
                    "GradScaler: the scale fell to {:e}, since gradients overflow even without scaling{overflowed}, and every \
                     such step was skipped: the training has diverged, or its inputs contain infinities or NaNs. Lower the \
                     learning rate, or check the inputs; in a run without the scaler, OnNonFinite::Stop names the rank too",
                    self.scale
                ));
            }
            return Ok(());
        }
        self.clean_steps += 1;
        if self.clean_steps >= self.options.growth_interval {
            self.clean_steps = 0;
            // The scale does not grow beyond the range of f32.
            let larger = self.scale * self.options.growth_factor;
            if (larger as f32).is_finite() {
                self.scale = larger;
            }
        }
        Ok(())
    }

    /// The factor for losses in this step; 1 if the scaler is not enabled.
    pub fn current_scale(&self) -> f64 {
        if self.options.enabled { self.scale } else { 1.0 }
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

/// The text mentions `step_if_finite` too: with `update` alone, a second optimizer would divide the same gradients again.
const STEPPED: &str = "`step` was already called in this step: call `update` before the next backward pass, and step \
                       several optimizers together, in one `step_if_finite`";

fn misuse(call: &'static str, reason: &str) -> Error {
    let reason = format!("{reason} (each training step: scale, unscale if needed, step, update)");
    Error::GradScaler { call, reason }
}

/// The names of PyTorch's `state_dict`; the same on every rank.
impl StateDict for GradScaler {
    fn state_dict(&self) -> Result<HashMap<String, Tensor>> {
        let GradScalerOptions { growth_factor, backoff_factor, growth_interval, .. } = self.options;
        // An interval of usize::MAX, which means never, is too large for a file.
        let count = |value: usize| state::count(value.min(i64::MAX as usize) as u64);
        let mut dict = state::begin("GradScaler")?;
        dict.insert("scale".to_string(), state::list(&[self.scale])?);
        dict.insert("growth_factor".to_string(), state::list(&[growth_factor])?);
        dict.insert("backoff_factor".to_string(), state::list(&[backoff_factor])?);
        dict.insert("growth_interval".to_string(), count(growth_interval)?);
        dict.insert("growth_tracker".to_string(), count(self.clean_steps)?);
        Ok(dict)
    }

    /// As documented for the trait; [`Error::InvalidArgument`] for invalid values, and [`Error::GradScaler`] for a call
    /// in the middle of a training step.
    fn load_state_dict(&mut self, dict: &HashMap<String, Tensor>) -> Result<()> {
        let mut loader = Loader::new(dict, "GradScaler")?;
        let options = GradScalerOptions {
            init_scale: loader.list("scale", 1)?[0],
            growth_factor: loader.list("growth_factor", 1)?[0],
            backoff_factor: loader.list("backoff_factor", 1)?[0],
            growth_interval: loader.count("growth_interval")? as usize,
            enabled: self.options.enabled,
        };
        let clean_steps = loader.count("growth_tracker")? as usize;
        loader.finish()?;
        options.check("scale")?;
        if self.stage != Stage::Scaled {
            return Err(misuse("load_state_dict", "a training step is under way: call `update` first"));
        }
        (self.scale, self.clean_steps, self.options) = (options.init_scale, clean_steps, options);
        Ok(())
    }
}
