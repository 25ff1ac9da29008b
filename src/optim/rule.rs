//! The rule by which an optimizer updates one parameter: the part that differs between optimizers.
use crate::kernels::{Rule, Scalars};
use crate::tensor::{Element, Real};
use crate::{Error, Result};
use std::fmt::Debug;

/// The options of an optimizer, which determine how it updates a parameter. Implemented by
/// [`ParamsAdamW`](candle_nn::ParamsAdamW), [`ParamsAdam`](super::ParamsAdam), [`ParamsSgd`](super::ParamsSgd) and
/// [`ParamsLamb`](super::ParamsLamb); other types cannot implement it.
pub trait UpdateRule: Kernel + Clone + Debug {}

impl<R: Kernel + Clone + Debug> UpdateRule for R {}

/// The step of a parameter and the scale of its gradient.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    /// The number of updates of this parameter, including this one.
    pub step: u64,
    /// The factor for gradients.
    pub gradient_scale: f64,
}

/// Parts of equal length of a parameter, its gradient and its state. An elementwise rule may be given any part of a
/// parameter.
pub struct Slices<'a, 'b, E: Element> {
    /// Changed in place.
    pub parameter: &'a mut [E],
    /// Read only.
    pub gradient: &'a [E],
    /// Changed in place; one for each of the rule's states.
    pub states: &'a mut [&'b mut [E::Real]],
}

/// The factor that scales gradients with norm `norm` down to the limit of `rule`, if it has one.
pub(super) fn limit<R: UpdateRule>(rule: &R, norm: f64) -> f64 {
    match rule.max_grad_norm() {
        Some(max) if norm > max => max / norm,
        _ => 1.,
    }
}

/// Two sums over a parameter.
pub(super) type Sums = [f64; 2];

/// The sealed part of [`UpdateRule`].
pub trait Kernel {
    /// The optimizer's name in messages and files.
    const NAME: &'static str;

    /// PyTorch's names for the state of a parameter.
    fn states(&self) -> &'static [&'static str];

    /// Refuses invalid options.
    fn check(&self) -> Result<()>;

    /// The learning rate.
    fn learning_rate(&self) -> f64;

    /// Changes the learning rate.
    fn set_learning_rate(&mut self, learning_rate: f64);

    /// The norm of all gradients of the optimizer above which they are scaled down.
    fn max_grad_norm(&self) -> Option<f64> {
        None
    }

    /// Whether an update depends on sums over the whole parameter, which [`prepare`](Self::prepare) computes.
    const NEEDS_SUMS: bool = false;

    /// Runs before [`update`](Self::update) if that needs sums; returns the sums over this part of the parameter.
    fn prepare<E: Element>(&self, _: Moment, _: Slices<'_, '_, E>) -> Sums {
        Sums::default()
    }

    /// Updates parameter and state. `sums` are over all parts of the parameter.
    fn update<E: Element>(&self, moment: Moment, sums: Sums, slices: Slices<'_, '_, E>);

    /// The CUDA kernels of this rule.
    const RULE: Rule;

    /// The arguments of the CUDA kernels.
    fn scalars(&self, moment: Moment) -> Scalars;
}

/// Refuses values that are not finite or below zero.
pub(super) fn not_negative(argument: &'static str, value: f64) -> Result<()> {
    if value.is_finite() && value >= 0. {
        return Ok(());
    }
    Err(Error::invalid(argument, format!("it must be a finite number of at least 0, but is {value}")))
}

/// Refuses values outside of `0 <= value < 1`.
pub(super) fn fraction(argument: &'static str, value: f64) -> Result<()> {
    if (0. ..1.).contains(&value) {
        return Ok(());
    }
    Err(Error::invalid(argument, format!("it must be at least 0 and below 1, but is {value}")))
}

/// `1 - beta^step`.
pub(super) fn bias_correction(beta: f64, step: u64) -> f64 {
    1. - beta.powf(step as f64)
}

/// Updates the first and second moment with a gradient, and returns them.
#[inline(always)]
pub(super) fn moments<R: Real>(m: &mut R, v: &mut R, gradient: R, rates: &MomentRates<R>) -> (R, R) {
    *m = *m * rates.beta1 + gradient * rates.rate1;
    *v = *v * rates.beta2 + gradient * gradient * rates.rate2;
    (*m, *v)
}

/// How fast moments follow gradients.
pub(super) struct MomentRates<R> {
    beta1: R,
    rate1: R,
    beta2: R,
    rate2: R,
}

impl<R: Real> MomentRates<R> {
    pub(super) fn new(beta1: f64, beta2: f64) -> Self {
        Self::with_rate1(beta1, beta2, 1. - beta1)
    }

    pub(super) fn with_rate1(beta1: f64, beta2: f64, rate1: f64) -> Self {
        let real = R::from_f64;
        Self { beta1: real(beta1), rate1: real(rate1), beta2: real(beta2), rate2: real(1. - beta2) }
    }
}
