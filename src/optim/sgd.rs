//! Stochastic gradient descent.
use super::kernel::{Kernel, Moment, Slices, Sums};
use super::rule::{UpdateRule, not_negative};
use super::update::by_kernel;
use crate::kernels::{Rule, Scalars, scalars};
use crate::tensor::{Element, Real};
use crate::{Error, Result};
use candle_core::WithDType;

/// Options of [`Sgd`](super::Sgd), with the meaning and defaults of PyTorch's `torch.optim.SGD`.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamsSgd {
    /// Learning rate. Default: 0.001.
    pub lr: f64,
    /// The fraction of the last update's direction that is kept. Default: 0, without state.
    pub momentum: f64,
    /// The gradient enters the direction with the factor 1 minus this, except in the first step. Default: 0.
    pub dampening: f64,
    /// Multiplied by the parameter and added to its gradient. Default: 0.
    pub weight_decay: f64,
    /// Whether to use Nesterov momentum, which needs momentum and no dampening. Default: false.
    pub nesterov: bool,
}

impl Default for ParamsSgd {
    fn default() -> Self {
        Self { lr: 1e-3, momentum: 0., dampening: 0., weight_decay: 0., nesterov: false }
    }
}

impl UpdateRule for ParamsSgd {
    const NAME: &'static str = "Sgd";

    const ELEMENTWISE: bool = true;

    fn states(&self) -> &'static [&'static str] {
        if self.momentum == 0. { &[] } else { &["momentum_buffer"] }
    }

    fn check(&self) -> Result<()> {
        not_negative("lr", self.lr)?;
        not_negative("momentum", self.momentum)?;
        not_negative("weight_decay", self.weight_decay)?;
        if !self.dampening.is_finite() {
            return Err(Error::invalid("dampening", format!("it must be a finite number, but is {}", self.dampening)));
        }
        if self.nesterov && (self.momentum == 0. || self.dampening != 0.) {
            return Err(Error::invalid("nesterov", "Nesterov's momentum needs a momentum above 0 and dampening 0"));
        }
        Ok(())
    }

    by_kernel!();
}

impl Kernel for ParamsSgd {
    #[inline(always)]
    fn apply<E: Element>(&self, moment: Moment, _: Sums, slices: Slices<'_, '_, E>) {
        let real = E::Real::from_f64;
        let (lr, decay, scale) = (real(self.lr), real(self.weight_decay), real(moment.gradient_scale));
        let pairs = slices.parameter.iter_mut().zip(slices.gradient);
        let [direction] = slices.states else {
            for (parameter, gradient) in pairs {
                let value = parameter.widen();
                *parameter = E::narrow(value - (gradient.widen() * scale).plus_decay(value, decay) * lr);
            }
            return;
        };
        // In the first step the direction is the gradient, without dampening. The stored direction is zero then, so the
        // same sum works.
        let momentum = real(self.momentum);
        let share = real(self.share(moment));
        if self.nesterov {
            for ((parameter, gradient), direction) in pairs.zip(direction.iter_mut()) {
                let value = parameter.widen();
                let gradient = (gradient.widen() * scale).plus_decay(value, decay);
                *direction = *direction * momentum + gradient * share;
                *parameter = E::narrow(value - (gradient + *direction * momentum) * lr);
            }
        } else {
            for ((parameter, gradient), direction) in pairs.zip(direction.iter_mut()) {
                let value = parameter.widen();
                let gradient = (gradient.widen() * scale).plus_decay(value, decay);
                *direction = *direction * momentum + gradient * share;
                *parameter = E::narrow(value - *direction * lr);
            }
        }
    }

    const RULE: Rule = Rule::Sgd;

    /// `SgdScalars` of `sgd.cu`.
    fn scalars(&self, moment: Moment) -> Scalars {
        let nesterov = f64::from(u8::from(self.nesterov));
        scalars([self.lr, self.weight_decay, moment.gradient_scale, self.momentum, self.share(moment), nesterov])
    }
}

impl ParamsSgd {
    /// The factor with which a gradient enters the direction.
    fn share(&self, moment: Moment) -> f64 {
        if moment.step == 1 { 1. } else { 1. - self.dampening }
    }
}
