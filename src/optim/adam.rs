//! Adam, and Adam with decoupled weight decay.
use super::kernel::{Fused, Kernel, Moment, MomentRates, Slices, Sums, bias_correction, moments};
use super::rule::{UpdateRule, fraction, not_negative};
use super::update::update_copies;
use crate::Result;
use crate::kernels::{Rule, Scalars, scalars};
use crate::tensor::{Element, Real};
use candle_core::{Tensor, WithDType};
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

/// The two kinds of weight decay.
struct Decay {
    /// Added to the gradient.
    coupled: f64,
    /// Subtracted from the parameter, times the learning rate.
    decoupled: f64,
}

#[inline(always)]
fn update<E: Element>(
    ParamsAdam { lr, beta1, beta2, eps, .. }: ParamsAdam,
    decay: Decay,
    moment: Moment,
    slices: Slices<'_, '_, E>,
) {
    let [m, v] = slices.states else { return };
    let rates = MomentRates::new(beta1, beta2);
    let real = E::Real::from_f64;
    let step_size = real(lr / bias_correction(beta1, moment.step));
    let root = real(1. / bias_correction(beta2, moment.step).sqrt());
    let (eps, scale, coupled) = (real(eps), real(moment.gradient_scale), real(decay.coupled));
    let keep = real(1. - lr * decay.decoupled);
    let states = m.iter_mut().zip(v.iter_mut());
    for ((parameter, gradient), (m, v)) in slices.parameter.iter_mut().zip(slices.gradient).zip(states) {
        let value = parameter.widen();
        let gradient = (gradient.widen() * scale).plus_decay(value, coupled);
        let (m, v) = moments(m, v, gradient, &rates);
        *parameter = E::narrow(value * keep - m * step_size / (v.sqrt() * root + eps));
    }
}

/// `AdamScalars` of `adam.cu`.
fn cuda(ParamsAdam { lr, beta1, beta2, eps, .. }: ParamsAdam, decay: Decay, moment: Moment) -> Scalars {
    let step_size = lr / bias_correction(beta1, moment.step);
    let root = 1. / bias_correction(beta2, moment.step).sqrt();
    let keep = 1. - lr * decay.decoupled;
    let (rate1, rate2) = (1. - beta1, 1. - beta2);
    scalars([beta1, rate1, beta2, rate2, step_size, root, eps, moment.gradient_scale, decay.coupled, keep])
}

fn check(lr: f64, beta1: f64, beta2: f64, eps: f64, weight_decay: f64) -> Result<()> {
    not_negative("lr", lr)?;
    fraction("beta1", beta1)?;
    fraction("beta2", beta2)?;
    not_negative("eps", eps)?;
    not_negative("weight_decay", weight_decay)
}

impl UpdateRule for ParamsAdam {
    const NAME: &'static str = "Adam";

    const ELEMENTWISE: bool = true;

    fn states(&self) -> &'static [&'static str] {
        MOMENTS
    }

    fn check(&self) -> Result<()> {
        check(self.lr, self.beta1, self.beta2, self.eps, self.weight_decay)
    }

    fn learning_rate(&self) -> f64 {
        self.lr
    }

    fn set_learning_rate(&mut self, learning_rate: f64) {
        self.lr = learning_rate;
    }

    fn update(&self, parameter: &Tensor, gradient: &Tensor, states: &mut [Tensor], step: u64) -> Result<Tensor> {
        update_copies(self, parameter, gradient, states, step)
    }

    fn fused(&self) -> Option<Fused<'_>> {
        Some(Fused::new(self))
    }
}

impl Kernel for ParamsAdam {
    #[inline(always)]
    fn apply<E: Element>(&self, moment: Moment, _: Sums, slices: Slices<'_, '_, E>) {
        let decay = Decay { coupled: self.weight_decay, decoupled: 0. };
        update(self.clone(), decay, moment, slices);
    }

    const RULE: Rule = Rule::Adam;

    fn scalars(&self, moment: Moment) -> Scalars {
        cuda(self.clone(), Decay { coupled: self.weight_decay, decoupled: 0. }, moment)
    }
}

impl UpdateRule for ParamsAdamW {
    const NAME: &'static str = "AdamW";

    const ELEMENTWISE: bool = true;

    fn states(&self) -> &'static [&'static str] {
        MOMENTS
    }

    fn check(&self) -> Result<()> {
        check(self.lr, self.beta1, self.beta2, self.eps, self.weight_decay)
    }

    fn learning_rate(&self) -> f64 {
        self.lr
    }

    fn set_learning_rate(&mut self, learning_rate: f64) {
        self.lr = learning_rate;
    }

    fn update(&self, parameter: &Tensor, gradient: &Tensor, states: &mut [Tensor], step: u64) -> Result<Tensor> {
        update_copies(self, parameter, gradient, states, step)
    }

    fn fused(&self) -> Option<Fused<'_>> {
        Some(Fused::new(self))
    }
}

impl Kernel for ParamsAdamW {
    #[inline(always)]
    fn apply<E: Element>(&self, moment: Moment, _: Sums, slices: Slices<'_, '_, E>) {
        let Self { lr, beta1, beta2, eps, weight_decay } = *self;
        let decay = Decay { coupled: 0., decoupled: weight_decay };
        update(ParamsAdam { lr, beta1, beta2, eps, weight_decay: 0. }, decay, moment, slices);
    }

    const RULE: Rule = Rule::Adam;

    fn scalars(&self, moment: Moment) -> Scalars {
        let Self { lr, beta1, beta2, eps, weight_decay } = *self;
        let decay = Decay { coupled: 0., decoupled: weight_decay };
        cuda(ParamsAdam { lr, beta1, beta2, eps, weight_decay: 0. }, decay, moment)
    }
}
