//! Learning rates as functions of the number of steps.
mod state;

use super::optimizer::Optimizer;
use super::other_length::{LENGTH, OnOtherLength};
use super::rule::{fraction, not_negative};
use super::setting::{choice, settings};
use super::unsaved;
use crate::state::StateDict;
use crate::{Error, Result};
use std::f64::consts::PI;

/// A learning rate as a function of the number of steps: the options of a schedule. A program that chooses one at run time
/// stores a `Box<dyn Schedule>`.
pub trait Schedule {
    /// The schedule's name in messages and files.
    fn name(&self) -> &'static str;

    /// Refuses invalid options.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`](crate::Error::InvalidArgument) for an option that makes no schedule.
    fn check(&self) -> Result<()>;

    /// The learning rate in step `step`, counted from 0, of a group whose own learning rate is `base`.
    fn learning_rate(&self, base: f64, step: u64) -> f64;

    /// The number of steps over which the schedule is spread, or after which it repeats itself. A state has it: a resumed run in which it
    /// is another one must say how it continues ([`OnOtherLength`]). None, the default, for a schedule that depends on no such number.
    fn length(&self) -> Option<u64> {
        None
    }

    /// The options that a state has, with their names.
    #[doc(hidden)]
    fn settings(&self) -> Vec<(&'static str, Vec<f64>)> {
        self.length().map(|length| (LENGTH, vec![length as f64])).into_iter().collect()
    }

    /// The names of those that are counted in steps, beginning with the length.
    #[doc(hidden)]
    fn lengths(&self) -> &'static [&'static str] {
        &[LENGTH]
    }

    /// Sets one of them. Returns whether it could.
    #[doc(hidden)]
    fn set(&mut self, _name: &str, _numbers: &[f64]) -> bool {
        false
    }
}

impl<S: Schedule + ?Sized> Schedule for Box<S> {
    fn name(&self) -> &'static str {
        (**self).name()
    }

    fn check(&self) -> Result<()> {
        (**self).check()
    }

    fn learning_rate(&self, base: f64, step: u64) -> f64 {
        (**self).learning_rate(base, step)
    }

    fn length(&self) -> Option<u64> {
        (**self).length()
    }

    fn settings(&self) -> Vec<(&'static str, Vec<f64>)> {
        (**self).settings()
    }

    fn lengths(&self) -> &'static [&'static str] {
        (**self).lengths()
    }

    fn set(&mut self, name: &str, numbers: &[f64]) -> bool {
        (**self).set(name, numbers)
    }
}

/// Changes the learning rates of an optimizer from step to step: an [`LrScheduler`] of any [`Schedule`], or a
/// [`ReduceLrOnPlateau`](super::ReduceLrOnPlateau). A program that chooses one at run time stores a `Box<dyn Scheduler>`:
///
/// ```
/// # use candle_ddp::optim::{Optimizer, ParamsSgd, ParamsStepLr, ReduceLrOnPlateau, Scheduler, Sgd, StepLr};
/// # fn main() -> candle_ddp::Result<()> {
/// # let (plateau, loss) = (false, 1.0);
/// let mut optimizer = Sgd::new(Vec::<candle_core::Var>::new(), ParamsSgd { lr: 0.1, ..Default::default() })?;
/// let mut scheduler: Box<dyn Scheduler> = match plateau {
///     true => Box::new(ReduceLrOnPlateau::new(Default::default())?),
///     false => Box::new(StepLr::new(&mut optimizer, ParamsStepLr { step_size: 1, gamma: 0.5 })?),
/// };
/// scheduler.step_by(&mut optimizer, loss)?;
/// assert_eq!(optimizer.learning_rate(), 0.05);
/// # Ok(())
/// # }
/// ```
pub trait Scheduler: StateDict {
    /// Advances to the next step and sets the learning rates of `optimizer`. `metric`, the same on all ranks, is what a
    /// [`ReduceLrOnPlateau`](super::ReduceLrOnPlateau) watches; schedules ignore it.
    ///
    /// # Errors
    /// The errors of the scheduler's own `step`.
    fn step_by(&mut self, optimizer: &mut dyn Optimizer, metric: f64) -> Result<()>;
}

impl<S: Schedule> Scheduler for LrScheduler<S> {
    fn step_by(&mut self, optimizer: &mut dyn Optimizer, _: f64) -> Result<()> {
        self.step(optimizer)
    }
}

/// Applies a schedule to the learning rates of an optimizer's groups: [`StepLr`], [`MultiStepLr`],
/// [`CosineAnnealingLr`], [`WarmupCosine`] and [`OneCycleLr`].
///
/// As in PyTorch, call its `step` after the optimizer's. Whether you do so once per batch or once per epoch decides
/// what "step" means in the options. Every rank must do the same.
///
/// ```
/// # use candle_ddp::optim::{Optimizer, ParamsSgd, ParamsStepLr, Sgd, StepLr};
/// # fn main() -> candle_ddp::Result<()> {
/// let mut optimizer = Sgd::new(Vec::<candle_core::Var>::new(), ParamsSgd { lr: 0.1, ..Default::default() })?;
/// let mut schedule = StepLr::new(&mut optimizer, ParamsStepLr { step_size: 2, gamma: 0.5 })?;
/// for epoch in 0..4 {
///     // … optimizer.step(&grads)? for every batch …
///     schedule.step(&mut optimizer)?;
/// }
/// assert_eq!(optimizer.learning_rate(), 0.025);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct LrScheduler<S> {
    schedule: S,
    base: Vec<f64>,
    step: u64,
    on_other_length: OnOtherLength,
}

impl<S: Schedule> LrScheduler<S> {
    /// Starts from the current learning rates of `optimizer` as base rates, and sets the rates of the first step.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for invalid options.
    pub fn new(optimizer: &mut (impl Optimizer + ?Sized), schedule: S) -> Result<Self> {
        schedule.check()?;
        let on_other_length = OnOtherLength::default();
        let scheduler = Self { schedule, base: optimizer.learning_rates(), step: 0, on_other_length };
        optimizer.set_learning_rates(&scheduler.learning_rates())?;
        Ok(scheduler)
    }

    /// Says how the run continues when it loads a state that was saved with another length. By default, this is an error.
    pub fn on_other_length(self, on_other_length: OnOtherLength) -> Self {
        Self { on_other_length, ..self }
    }

    /// The learning rates of the current step, one for each group.
    pub fn learning_rates(&self) -> Vec<f64> {
        self.base.iter().map(|base| self.schedule.learning_rate(*base, self.step)).collect()
    }

    /// Advances to the next step, without an optimizer.
    pub fn advance(&mut self) {
        unsaved::stepped();
        self.step += 1;
    }

    /// Advances to the next step and sets the learning rates of `optimizer`. Groups that the optimizer has got since the
    /// last step have their current learning rates as base rates.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if the optimizer has fewer groups than before.
    pub fn step(&mut self, optimizer: &mut (impl Optimizer + ?Sized)) -> Result<()> {
        self.base.extend(optimizer.learning_rates().into_iter().skip(self.base.len()));
        self.advance();
        optimizer.set_learning_rates(&self.learning_rates())
    }
}

/// PyTorch's `StepLR`.
pub type StepLr = LrScheduler<ParamsStepLr>;
/// PyTorch's `MultiStepLR`.
pub type MultiStepLr = LrScheduler<ParamsMultiStepLr>;
/// PyTorch's `CosineAnnealingLR`.
pub type CosineAnnealingLr = LrScheduler<ParamsCosineAnnealingLr>;
/// A linear warm-up, then a cosine: PyTorch's `SequentialLR` of `LinearLR` and `CosineAnnealingLR`.
pub type WarmupCosine = LrScheduler<ParamsWarmupCosine>;
/// PyTorch's `OneCycleLR` with `cycle_momentum=False`. The groups' own learning rates are the peaks (`max_lr`).
pub type OneCycleLr = LrScheduler<ParamsOneCycleLr>;

/// Multiplies the learning rate by `gamma` every `step_size` steps.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamsStepLr {
    /// The number of steps between changes.
    pub step_size: u64,
    /// Default: 0.1.
    pub gamma: f64,
}

impl Default for ParamsStepLr {
    /// `step_size` has no default in PyTorch; here it is 1.
    fn default() -> Self {
        Self { step_size: 1, gamma: 0.1 }
    }
}

impl Schedule for ParamsStepLr {
    settings!(step_size; gamma);

    fn name(&self) -> &'static str {
        "StepLr"
    }

    fn check(&self) -> Result<()> {
        at_least_one("step_size", self.step_size)?;
        not_negative("gamma", self.gamma)
    }

    fn learning_rate(&self, base: f64, step: u64) -> f64 {
        base * self.gamma.powf((step / self.step_size) as f64)
    }
}

/// Multiplies the learning rate by `gamma` at each milestone.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamsMultiStepLr {
    /// The steps, in any order; a step given twice counts twice.
    pub milestones: Vec<u64>,
    /// Default: 0.1.
    pub gamma: f64,
}

impl Default for ParamsMultiStepLr {
    fn default() -> Self {
        Self { milestones: Vec::new(), gamma: 0.1 }
    }
}

impl Schedule for ParamsMultiStepLr {
    settings!(milestones; gamma);

    fn name(&self) -> &'static str {
        "MultiStepLr"
    }

    fn check(&self) -> Result<()> {
        not_negative("gamma", self.gamma)
    }

    fn learning_rate(&self, base: f64, step: u64) -> f64 {
        let passed = self.milestones.iter().filter(|milestone| **milestone <= step).count();
        base * self.gamma.powf(passed as f64)
    }
}

/// Follows half a cosine from the learning rate to `eta_min` in `t_max` steps, and back in the next `t_max`.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamsCosineAnnealingLr {
    /// The number of steps from the highest learning rate to the lowest.
    pub t_max: u64,
    /// The lowest learning rate. Default: 0.
    pub eta_min: f64,
}

impl Default for ParamsCosineAnnealingLr {
    /// `t_max` has no default in PyTorch; here it is 1.
    fn default() -> Self {
        Self { t_max: 1, eta_min: 0. }
    }
}

impl Schedule for ParamsCosineAnnealingLr {
    settings!(t_max; eta_min);

    fn name(&self) -> &'static str {
        "CosineAnnealingLr"
    }

    fn check(&self) -> Result<()> {
        at_least_one("t_max", self.t_max)?;
        not_negative("eta_min", self.eta_min)
    }

    fn learning_rate(&self, base: f64, step: u64) -> f64 {
        cosine(base, self.eta_min, step as f64 / self.t_max as f64)
    }
}

/// Rises from `start_factor` × the learning rate to the learning rate in `warmup_steps` steps, then follows half a
/// cosine down to `eta_min` at step `total_steps` and stays there.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamsWarmupCosine {
    /// The number of steps from the lowest learning rate to the highest. Default: 0, no warm-up.
    pub warmup_steps: u64,
    /// The number of steps of warm-up and cosine together.
    pub total_steps: u64,
    /// The fraction of the learning rate at which the warm-up starts. Default: 0.
    pub start_factor: f64,
    /// The learning rate at the end. Default: 0.
    pub eta_min: f64,
}

impl Default for ParamsWarmupCosine {
    fn default() -> Self {
        Self { warmup_steps: 0, total_steps: 1, start_factor: 0., eta_min: 0. }
    }
}

impl Schedule for ParamsWarmupCosine {
    settings!(total_steps, warmup_steps; start_factor, eta_min);

    fn name(&self) -> &'static str {
        "WarmupCosine"
    }

    fn check(&self) -> Result<()> {
        not_negative("start_factor", self.start_factor)?;
        not_negative("eta_min", self.eta_min)?;
        if self.total_steps <= self.warmup_steps {
            let (total, warmup) = (self.total_steps, self.warmup_steps);
            let reason = format!("it must be above warmup_steps ({warmup}), but is {total}");
            return Err(Error::invalid("total_steps", reason));
        }
        Ok(())
    }

    fn learning_rate(&self, base: f64, step: u64) -> f64 {
        if step < self.warmup_steps {
            let progress = step as f64 / self.warmup_steps as f64;
            return base * (self.start_factor + (1. - self.start_factor) * progress);
        }
        let steps = (self.total_steps - self.warmup_steps) as f64;
        cosine(base, self.eta_min, ((step - self.warmup_steps) as f64 / steps).min(1.))
    }
}

/// The curve between two learning rates of a one-cycle schedule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Anneal {
    /// Half a cosine.
    #[default]
    Cosine,
    /// A straight line.
    Linear,
}

choice!(Anneal: Anneal::Cosine, Anneal::Linear);

/// Rises from `max_lr / div_factor` to `max_lr`, then falls to `max_lr / div_factor / final_div_factor`, where `max_lr` is
/// the group's own learning rate. After `total_steps` the learning rate stays at its final value (PyTorch raises an
/// error). A phase that `pct_start` leaves without steps is skipped (PyTorch divides by zero).
#[derive(Clone, Debug, PartialEq)]
pub struct ParamsOneCycleLr {
    /// The number of steps of the whole cycle.
    pub total_steps: u64,
    /// The fraction of the steps that rise. Default: 0.3.
    pub pct_start: f64,
    /// Default: cosine.
    pub anneal_strategy: Anneal,
    /// Default: 25.
    pub div_factor: f64,
    /// Default: 10 000.
    pub final_div_factor: f64,
    /// Whether to fall to the initial learning rate as fast as it rose, then on to the final one. Default: false.
    pub three_phase: bool,
}

impl Default for ParamsOneCycleLr {
    /// `total_steps` has no default in PyTorch; here it is 2.
    fn default() -> Self {
        Self {
            total_steps: 2,
            pct_start: 0.3,
            anneal_strategy: Anneal::Cosine,
            div_factor: 25.,
            final_div_factor: 1e4,
            three_phase: false,
        }
    }
}

impl Schedule for ParamsOneCycleLr {
    settings!(total_steps; pct_start, anneal_strategy, div_factor, final_div_factor, three_phase);

    fn name(&self) -> &'static str {
        "OneCycleLr"
    }

    fn check(&self) -> Result<()> {
        at_least_one("total_steps", self.total_steps)?;
        fraction("pct_start", self.pct_start)?;
        for (argument, value) in [("div_factor", self.div_factor), ("final_div_factor", self.final_div_factor)] {
            if !value.is_finite() || value <= 0. {
                return Err(Error::invalid(argument, format!("it must be a finite number above 0, but is {value}")));
            }
        }
        Ok(())
    }

    fn learning_rate(&self, max: f64, step: u64) -> f64 {
        let initial = max / self.div_factor;
        let (total, min) = (self.total_steps as f64, initial / self.final_div_factor);
        let top = self.pct_start * total - 1.;
        let second = if self.three_phase { 2. * top } else { total - 1. };
        let phases = [
            (top, initial, max),
            (second, max, if self.three_phase { initial } else { min }),
            (total - 1., initial, min),
        ];
        let phases = if self.three_phase { &phases[..] } else { &phases[..2] };
        let step = (step as f64).min(total - 1.);
        let mut phase_start = 0.;
        for (index, (phase_end, from, to)) in phases.iter().copied().enumerate() {
            if step <= phase_end || index + 1 == phases.len() {
                // A phase without steps is at its end.
                let length = phase_end - phase_start;
                let progress = if length > 0. { (step - phase_start) / length } else { 1. };
                return match self.anneal_strategy {
                    Anneal::Cosine => cosine(from, to, progress),
                    Anneal::Linear => from + (to - from) * progress,
                };
            }
            phase_start = phase_end;
        }
        min
    }
}

/// Half a cosine from `from` at progress 0 to `to` at progress 1.
fn cosine(from: f64, to: f64, progress: f64) -> f64 {
    to + (from - to) * (1. + (PI * progress).cos()) / 2.
}

fn at_least_one(argument: &'static str, value: u64) -> Result<()> {
    if value == 0 { Err(Error::invalid(argument, "it must be at least 1")) } else { Ok(()) }
}
