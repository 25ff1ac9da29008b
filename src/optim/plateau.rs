//! Reduces learning rates when training stops making progress.
use super::optimizer::Optimizer;
use super::rule::not_negative;
use super::schedule::Scheduler;
use super::setting::{self, Setting, choice, settings};
use super::unsaved;
use crate::state::{self, Loader, StateDict};
use crate::{Error, Result};
use candle_core::Tensor;
use std::collections::HashMap;

/// Whether a smaller or a larger metric is better.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PlateauMode {
    /// Smaller is better, as for a loss.
    #[default]
    Min,
    /// Larger is better, as for an accuracy.
    Max,
}

/// The improvement that counts as progress.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Threshold {
    /// A fraction of the best value.
    Relative(f64),
    /// An absolute difference.
    Absolute(f64),
}

choice!(PlateauMode: PlateauMode::Min, PlateauMode::Max);

impl Setting for Threshold {
    fn numbers(&self) -> Vec<f64> {
        match self {
            Self::Relative(threshold) => vec![0., *threshold],
            Self::Absolute(threshold) => vec![1., *threshold],
        }
    }

    fn of(numbers: &[f64]) -> Option<Self> {
        match numbers {
            [0., threshold] => Some(Self::Relative(*threshold)),
            [1., threshold] => Some(Self::Absolute(*threshold)),
            _ => None,
        }
    }
}

/// Options of [`ReduceLrOnPlateau`], with PyTorch's meaning and defaults.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamsReduceLrOnPlateau {
    /// Default: `Min`.
    pub mode: PlateauMode,
    /// The factor by which learning rates are reduced. Default: 0.1.
    pub factor: f64,
    /// The number of steps without progress that are accepted. Default: 10.
    pub patience: u64,
    /// Default: relative, 1e-4.
    pub threshold: Threshold,
    /// The number of steps after a reduction that are not counted. Default: 0.
    pub cooldown: u64,
    /// The lowest learning rate. Default: 0.
    pub min_lr: f64,
    /// A learning rate is changed only if it changes by more than this. Default: 1e-8.
    pub eps: f64,
}

impl Default for ParamsReduceLrOnPlateau {
    fn default() -> Self {
        Self {
            mode: PlateauMode::Min,
            factor: 0.1,
            patience: 10,
            threshold: Threshold::Relative(1e-4),
            cooldown: 0,
            min_lr: 0.,
            eps: 1e-8,
        }
    }
}

impl ParamsReduceLrOnPlateau {
    settings!(mode, factor, patience, threshold, cooldown, min_lr, eps);

    fn check(&self) -> Result<()> {
        if !(0. ..1.).contains(&self.factor) {
            return Err(Error::invalid("factor", format!("it must be below 1, but is {}", self.factor)));
        }
        not_negative("min_lr", self.min_lr)?;
        not_negative("eps", self.eps)?;
        let (Threshold::Relative(threshold) | Threshold::Absolute(threshold)) = self.threshold;
        not_negative("threshold", threshold)
    }
}

/// Reduces the learning rates when a metric has stopped improving: PyTorch's `ReduceLROnPlateau`.
///
/// Every rank must pass the same metric, or the learning rates diverge: all-reduce it first.
#[derive(Clone, Debug)]
pub struct ReduceLrOnPlateau {
    options: ParamsReduceLrOnPlateau,
    best: f64,
    bad_steps: u64,
    cooldown: u64,
}

impl ReduceLrOnPlateau {
    /// A schedule that has not seen a metric yet.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for invalid options.
    pub fn new(options: ParamsReduceLrOnPlateau) -> Result<Self> {
        options.check()?;
        let best = match options.mode {
            PlateauMode::Min => f64::INFINITY,
            PlateauMode::Max => f64::NEG_INFINITY,
        };
        Ok(Self { options, best, bad_steps: 0, cooldown: 0 })
    }

    /// Records `metric`, and reduces the learning rates of `optimizer` if it is time to. Returns whether it did.
    ///
    /// # Errors
    /// Returns the errors of [`Optimizer::set_learning_rates`].
    pub fn step(&mut self, optimizer: &mut (impl Optimizer + ?Sized), metric: f64) -> Result<bool> {
        let mut rates = optimizer.learning_rates();
        let reduced = self.update(&mut rates, metric);
        optimizer.set_learning_rates(&rates)?;
        Ok(reduced)
    }

    fn update(&mut self, learning_rates: &mut [f64], metric: f64) -> bool {
        unsaved::stepped();
        if self.is_better(metric) {
            self.best = metric;
            self.bad_steps = 0;
        } else {
            self.bad_steps += 1;
        }
        if self.cooldown > 0 {
            self.cooldown -= 1;
            self.bad_steps = 0;
        }
        if self.bad_steps <= self.options.patience {
            return false;
        }
        for rate in learning_rates {
            let reduced = (*rate * self.options.factor).max(self.options.min_lr);
            if *rate - reduced > self.options.eps {
                *rate = reduced;
            }
        }
        self.cooldown = self.options.cooldown;
        self.bad_steps = 0;
        true
    }

    fn is_better(&self, metric: f64) -> bool {
        use {PlateauMode::*, Threshold::*};
        match (self.options.mode, self.options.threshold) {
            (Min, Relative(threshold)) => metric < self.best * (1. - threshold),
            (Min, Absolute(threshold)) => metric < self.best - threshold,
            (Max, Relative(threshold)) => metric > self.best * (1. + threshold),
            (Max, Absolute(threshold)) => metric > self.best + threshold,
        }
    }
}

impl Scheduler for ReduceLrOnPlateau {
    fn step_by(&mut self, optimizer: &mut dyn Optimizer, metric: f64) -> Result<()> {
        self.step(optimizer, metric).map(drop)
    }
}

/// Contains `best`, `bad_steps`, `cooldown`, and the options (`option.patience`), which are loaded as those of the other
/// [schedules](super::LrScheduler) are. The learning rates are in the optimizer's state.
impl StateDict for ReduceLrOnPlateau {
    fn state_dict(&self) -> Result<HashMap<String, Tensor>> {
        unsaved::saved();
        let mut dict = state::begin("ReduceLrOnPlateau")?;
        dict.insert("best".to_string(), state::list(&[self.best])?);
        dict.insert("bad_steps".to_string(), state::count(self.bad_steps)?);
        dict.insert("cooldown".to_string(), state::count(self.cooldown)?);
        setting::save(&mut dict, self.options.settings())?;
        Ok(dict)
    }

    fn load_state_dict(&mut self, dict: &HashMap<String, Tensor>) -> Result<()> {
        let mut loader = Loader::new(dict, "ReduceLrOnPlateau")?;
        let best = loader.list::<f64>("best", 1)?[0];
        let (bad_steps, cooldown) = (loader.count("bad_steps")?, loader.count("cooldown")?);
        let own = self.options.settings();
        let changed = setting::load(dict, &mut loader, &own)?;
        loader.finish()?;
        let (set, check) = (ParamsReduceLrOnPlateau::set, ParamsReduceLrOnPlateau::check);
        setting::apply(&mut self.options, &own, &changed, set, check)?;
        setting::warn_of_changed("ReduceLrOnPlateau", &own, &changed);
        (self.best, self.bad_steps, self.cooldown) = (best, bad_steps, cooldown);
        Ok(())
    }
}
