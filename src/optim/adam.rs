//! Adam, and Adam with decoupled weight decay.
use super::kernel::{Kernel, Moment, MomentRates, Slices, Sums, bias_correction, moments};
use super::rule::{UpdateRule, fraction, not_negative};
use super::update::by_kernel;
use crate::Result;
use crate::kernels::{Rule, Scalars, scalars};
use crate::tensor::{Element, Real};
use candle_core::WithDType;
use candle_nn::ParamsAdamW;

/// Options of [`Adam`](super::Adam), with the meaning and defaults of PyTorch's `torch.optim.Adam` (`amsgrad` off):
/// weight decay is added to the gradient (L2 regularisation).
#[derive(Clone, Debug, PartialEq)]
pub struct ParamsAdam {
    /// Learning rate. Default: 0.001.
    pub lr: f64,
    /// Decay rate of the mean of the gradients. Default: 0.9.
    pub beta1: f64,
    /// Decay rate of the mean of the squared gradients. Default: 0.999.
    pub beta2: f64,
    /// Added to the denominator. Default: 1e-8.
    pub eps: f64,
    /// Multiplied by the parameter and added to its gradient. Default: 0.
    pub weight_decay: f64,
}

impl Default for ParamsAdam {
    fn default() -> Self {
        Self { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0. }
    }
}

/// The state of both kinds of Adam.
pub(super) const MOMENTS: &[&str] = &["exp_avg", "exp_avg_sq"];

/// Both kinds of Adam.
struct AnyAdam {
    lr: f64,
    beta1: f64,
    beta2: f64,
    eps: f64,
    weight_decay: f64,
    /// Whether weight decay is subtracted from the parameter, times the learning rate, instead of added to the gradient.
    is_decoupled: bool,
}

impl From<&ParamsAdam> for AnyAdam {
    fn from(&ParamsAdam { lr, beta1, beta2, eps, weight_decay }: &ParamsAdam) -> Self {
        Self { lr, beta1, beta2, eps, weight_decay, is_decoupled: false }
    }
}

impl From<&ParamsAdamW> for AnyAdam {
    fn from(&ParamsAdamW { lr, beta1, beta2, eps, weight_decay }: &ParamsAdamW) -> Self {
        Self { lr, beta1, beta2, eps, weight_decay, is_decoupled: true }
    }
}

impl AnyAdam {
    fn check(&self) -> Result<()> {
        not_negative("lr", self.lr)?;
        fraction("beta1", self.beta1)?;
        fraction("beta2", self.beta2)?;
        not_negative("eps", self.eps)?;
        not_negative("weight_decay", self.weight_decay)
    }

    /// The factor with which a parameter is added to its gradient, and the one that is left of it.
    fn decay(&self) -> (f64, f64) {
        if self.is_decoupled { (0., 1. - self.lr * self.weight_decay) } else { (self.weight_decay, 1.) }
    }

    /// The length of a step, and the factor of the root of the second moment.
    fn step_size_and_root(&self, step: u64) -> (f64, f64) {
        (self.lr / bias_correction(self.beta1, step), 1. / bias_correction(self.beta2, step).sqrt())
    }

    #[inline(always)]
    fn apply<E: Element>(&self, moment: Moment, slices: Slices<'_, '_, E>) {
        let [m, v] = slices.states else { return };
        let rates = MomentRates::new(self.beta1, self.beta2);
        let real = E::Real::from_f64;
        let ((coupled, keep), (step_size, root)) = (self.decay(), self.step_size_and_root(moment.step));
        let [coupled, keep, step_size, root] = [coupled, keep, step_size, root].map(real);
        let (eps, scale) = (real(self.eps), real(moment.gradient_scale));
        let states = m.iter_mut().zip(v.iter_mut());
        for ((parameter, gradient), (m, v)) in slices.parameter.iter_mut().zip(slices.gradient).zip(states) {
            let value = parameter.widen();
            let gradient = (gradient.widen() * scale).plus_decay(value, coupled);
            let (m, v) = moments(m, v, gradient, &rates);
            *parameter = E::narrow(value * keep - m * step_size / (v.sqrt() * root + eps));
        }
    }

    /// `AdamScalars` of `adam.cu`.
    fn scalars(&self, moment: Moment) -> Scalars {
        let Self { beta1, beta2, eps, .. } = *self;
        let ((coupled, keep), (step_size, root)) = (self.decay(), self.step_size_and_root(moment.step));
        scalars([beta1, 1. - beta1, beta2, 1. - beta2, step_size, root, eps, moment.gradient_scale, coupled, keep])
    }
}

macro_rules! adam {
    ($options:ty, $name:literal) => {
        impl UpdateRule for $options {
            const NAME: &'static str = $name;

            const ELEMENTWISE: bool = true;

            fn states(&self) -> &'static [&'static str] {
                MOMENTS
            }

            fn check(&self) -> Result<()> {
                AnyAdam::from(self).check()
            }

            by_kernel!();
        }

        impl Kernel for $options {
            #[inline(always)]
            fn apply<E: Element>(&self, moment: Moment, _: Sums, slices: Slices<'_, '_, E>) {
                AnyAdam::from(self).apply(moment, slices);
            }

            const RULE: Rule = Rule::Adam;

            fn scalars(&self, moment: Moment) -> Scalars {
                AnyAdam::from(self).scalars(moment)
            }
        }
    };
}

adam!(ParamsAdam, "Adam");
adam!(ParamsAdamW, "AdamW");
