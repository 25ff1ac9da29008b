//! LAMB: Adam with a step length in proportion to the parameter's norm.
use super::adam::MOMENTS;
use super::kernel::{Kernel, Moment, MomentRates, Slices, Sums, bias_correction, moments};
use super::rule::{UpdateRule, fraction, not_negative};
use super::sums::sum_of_squares;
use super::update::by_kernel;
use crate::kernels::{Rule, Scalars, scalars};
use crate::tensor::{Element, Real};
use crate::{Error, Result};
use candle_core::WithDType;

/// Options of [`Lamb`](super::Lamb), with the meaning and defaults of Apex's `FusedLAMB`.
///
/// In a step, the gradients of all parameters are first scaled down if their common norm is above `max_grad_norm`. With
/// Adam's moments `m` and `v` (bias-corrected if selected), a parameter's update is `u = m / (sqrt(v) + eps) +
/// weight_decay · p`, and `p -= lr · ‖p‖ / ‖u‖ · u`. The *trust ratio* `‖p‖ / ‖u‖` is 1 if a norm is zero, and for
/// parameters without weight decay unless `use_nvlamb` is set.
///
/// A parameter's bias correction counts the steps in which it had a gradient, as in PyTorch's Adam. Apex counts all
/// steps of the group, so results differ for parameters that have no gradient in some steps.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamsLamb {
    /// Learning rate. Default: 0.001.
    pub lr: f64,
    /// Decay rate of the mean of the gradients. Default: 0.9.
    pub beta1: f64,
    /// Decay rate of the mean of the squared gradients. Default: 0.999.
    pub beta2: f64,
    /// Added to the denominator. Default: 1e-6.
    pub eps: f64,
    /// Weight decay. Default: 0.01.
    pub weight_decay: f64,
    /// Whether moments are divided by `1 - beta^step`. Default: true.
    pub bias_correction: bool,
    /// Whether weight decay is added to the update, as in AdamW, or to the gradient, as in Adam. Default: true.
    pub adam_w_mode: bool,
    /// Whether a gradient enters the mean with the factor `1 - beta1` or with 1. Default: true.
    pub grad_averaging: bool,
    /// The norm of all gradients above which they are scaled down to it; `None` disables this. Default: 1.
    pub max_grad_norm: Option<f64>,
    /// Whether parameters without weight decay use the trust ratio too. Default: false.
    pub use_nvlamb: bool,
}

impl Default for ParamsLamb {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-6,
            weight_decay: 0.01,
            bias_correction: true,
            adam_w_mode: true,
            grad_averaging: true,
            max_grad_norm: Some(1.),
            use_nvlamb: false,
        }
    }
}

/// Number of elements processed at a time.
const BLOCK: usize = 1024;

impl UpdateRule for ParamsLamb {
    const NAME: &'static str = "Lamb";

    fn states(&self) -> &'static [&'static str] {
        MOMENTS
    }

    fn check(&self) -> Result<()> {
        not_negative("lr", self.lr)?;
        fraction("beta1", self.beta1)?;
        fraction("beta2", self.beta2)?;
        not_negative("eps", self.eps)?;
        not_negative("weight_decay", self.weight_decay)?;
        match self.max_grad_norm {
            Some(norm) if norm.is_nan() || norm <= 0. => {
                Err(Error::invalid("max_grad_norm", format!("it must be above 0 or None, but is {norm}")))
            }
            _ => Ok(()),
        }
    }

    by_kernel!();
}

impl Kernel for ParamsLamb {
    fn max_grad_norm(&self) -> Option<f64> {
        self.max_grad_norm
    }

    const NEEDS_SUMS: bool = true;

    /// Updates the moments, and returns the sums of the squares of the parameter and of its update. Both are zero if
    /// there is no trust ratio.
    #[inline(always)]
    fn prepare<E: Element>(&self, moment: Moment, slices: Slices<'_, '_, E>) -> Sums {
        let [m, v] = slices.states else { return Sums::default() };
        let real = E::Real::from_f64;
        let rates = MomentRates::with_rate1(self.beta1, self.beta2, self.rate1());
        let (scale, coupled) = (real(moment.gradient_scale), real(self.decays().0));
        let direction = Direction::new(self, moment);
        let adapt = self.adapts();
        let [mut norm, mut update_norm] = Sums::default();
        // Blocks stay in the cache.
        let mut updates = [E::Real::default(); BLOCK];
        let states = m.chunks_mut(BLOCK).zip(v.chunks_mut(BLOCK));
        for ((p, g), (m, v)) in slices.parameter.chunks(BLOCK).zip(slices.gradient.chunks(BLOCK)).zip(states) {
            for ((p, g), (m, v)) in p.iter().zip(g).zip(m.iter_mut().zip(v.iter_mut())) {
                moments(m, v, (g.widen() * scale).plus_decay(p.widen(), coupled), &rates);
            }
            if adapt {
                for (((update, p), m), v) in updates.iter_mut().zip(p).zip(m).zip(v) {
                    *update = direction.of(p.widen(), *m, *v);
                }
                norm += sum_of_squares(p);
                update_norm += sum_of_squares(updates.get(..p.len()).unwrap_or_default());
            }
        }
        [norm, update_norm]
    }

    /// Applies the update, which is computed again instead of stored, with the trust ratio from the sums.
    #[inline(always)]
    fn apply<E: Element>(&self, moment: Moment, [norm, update_norm]: Sums, slices: Slices<'_, '_, E>) {
        let [m, v] = slices.states else { return };
        let ratio = if norm != 0. && update_norm != 0. { (norm / update_norm).sqrt() } else { 1. };
        let rate = E::Real::from_f64(self.lr * ratio);
        let direction = Direction::new(self, moment);
        for (parameter, (m, v)) in slices.parameter.iter_mut().zip(m.iter().zip(v.iter())) {
            let value = parameter.widen();
            *parameter = E::narrow(value - direction.of(value, *m, *v) * rate);
        }
    }

    const RULE: Rule = Rule::Lamb;

    /// `LambScalars` of `lamb.cu`.
    fn scalars(&self, moment: Moment) -> Scalars {
        let Self { lr, beta1, beta2, .. } = *self;
        let Direction { inverse1, root2, eps, decay } = Direction::<f64>::new(self, moment);
        let (scale, coupled, adapt) = (moment.gradient_scale, self.decays().0, f64::from(u8::from(self.adapts())));
        let (rate1, rate2) = (self.rate1(), 1. - beta2);
        scalars([beta1, rate1, beta2, rate2, scale, coupled, inverse1, root2, eps, decay, lr, adapt])
    }
}

impl ParamsLamb {
    /// The factor with which a gradient enters its mean.
    fn rate1(&self) -> f64 {
        if self.grad_averaging { 1. - self.beta1 } else { 1. }
    }

    /// The two kinds of weight decay: for the gradient and for the update.
    fn decays(&self) -> (f64, f64) {
        if self.adam_w_mode { (0., self.weight_decay) } else { (self.weight_decay, 0.) }
    }

    /// Whether the trust ratio is used.
    fn adapts(&self) -> bool {
        self.use_nvlamb || self.weight_decay != 0.
    }
}

/// The direction of an update.
struct Direction<R> {
    inverse1: R,
    root2: R,
    eps: R,
    decay: R,
}

impl<R: Real> Direction<R> {
    #[inline(always)]
    fn new(options: &ParamsLamb, moment: Moment) -> Self {
        let (correction1, correction2) = if options.bias_correction {
            (bias_correction(options.beta1, moment.step), bias_correction(options.beta2, moment.step))
        } else {
            (1., 1.)
        };
        let real = R::from_f64;
        Self {
            inverse1: real(1. / correction1),
            root2: real(1. / correction2.sqrt()),
            eps: real(options.eps),
            decay: real(options.decays().1),
        }
    }

    #[inline(always)]
    fn of(&self, value: R, m: R, v: R) -> R {
        (m * self.inverse1 / (v.sqrt() * self.root2 + self.eps)).plus_decay(value, self.decay)
    }
}
