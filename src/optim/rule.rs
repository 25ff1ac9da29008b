//! The rule by which an optimizer updates one parameter: the part that differs between optimizers.
use super::kernel::Fused;
use crate::{Error, Result};
use candle_core::{DType, Tensor, Var};
use std::fmt::Debug;

/// The options of an optimizer, which determine how it updates a parameter. [`FusedOptimizer`](super::FusedOptimizer)
/// works with every rule: with
/// [`ParamsAdamW`](candle_nn::ParamsAdamW), [`ParamsAdam`](super::ParamsAdam), [`ParamsSgd`](super::ParamsSgd) and
/// [`ParamsLamb`](super::ParamsLamb), which run as fused kernels, and with your own, made of candle's operations on any
/// device. Momentum, as an example:
///
/// ```
/// use candle_core::{DType, Device, Tensor, Var};
/// use candle_ddp::optim::{FusedOptimizer, Optimizer, UpdateRule};
///
/// #[derive(Clone, Debug)]
/// struct Momentum {
///     lr: f64,
/// }
///
/// impl UpdateRule for Momentum {
///     const NAME: &'static str = "Momentum";
///     const ELEMENTWISE: bool = true;
///
///     fn states(&self) -> &'static [&'static str] {
///         &["velocity"]
///     }
///
///     fn learning_rate(&self) -> f64 {
///         self.lr
///     }
///
///     fn set_learning_rate(&mut self, learning_rate: f64) {
///         self.lr = learning_rate;
///     }
///
///     fn update(&self, value: &Tensor, gradient: &Tensor, states: &mut [Tensor], _: u64) -> candle_ddp::Result<Tensor> {
///         states[0] = ((&states[0] * 0.9)? + gradient)?;
///         Ok((value - (&states[0] * self.lr)?)?)
///     }
/// }
///
/// # fn main() -> candle_ddp::Result<()> {
/// let x = Var::ones(2, DType::F32, &Device::Cpu)?;
/// let mut optimizer = FusedOptimizer::new(vec![x.clone()], Momentum { lr: 0.5 })?;
/// optimizer.step(&x.sum_all()?.backward()?)?;
/// assert_eq!(x.to_vec1::<f32>()?, [0.5, 0.5]);
/// # Ok(())
/// # }
/// ```
pub trait UpdateRule: Clone + Debug {
    /// The name of the optimizer in messages and files. A state is loaded only by a rule of the same name.
    const NAME: &'static str;

    /// Whether each element of the parameter and of its state depends only on the same element of parameter, gradient
    /// and state, as in AdamW, SGD and Lion. Under [sharding](crate::Sharding), the optimizer then passes pieces
    /// of parameters to [`update`](Self::update) on each rank. With another rule, such as Muon, one rank updates the whole parameter.
    /// (LAMB is updated in pieces as well, since its kernels add up their norms over all ranks.)
    const ELEMENTWISE: bool = false;

    /// The names of the state tensors of a parameter. A state dict contains them as `state.{parameter}.{name}`. They
    /// must differ from each other and from `step`, and must not be empty or contain `.` or `@`.
    fn states(&self) -> &'static [&'static str];

    /// Refuses invalid options. The optimizer calls it when it is made, and before it takes other options.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for the option that is invalid.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// The reason this rule cannot update a parameter, or `None`. The optimizer asks when it is made, and returns [`Error::Parameter`].
    fn refuses(&self, _parameter: &Var) -> Option<String> {
        None
    }

    /// The learning rate.
    fn learning_rate(&self) -> f64;

    /// Changes the learning rate.
    fn set_learning_rate(&mut self, learning_rate: f64);

    /// Returns the new value of a parameter, and replaces the tensors in `states` by their new values.
    ///
    /// `parameter`, `gradient`, each state and the result have the same shape, dtype and device, and no graph. Gradients end here:
    /// the optimizer makes the result the new value of the parameter. The shape is the parameter's own, or one-dimensional for a
    /// piece of it under [sharding](crate::Sharding). The dtype is f64 for parameters of f64, and
    /// f32 for parameters of f32, f16 and bf16: the optimizer converts 16-bit parameters and gradients, and rounds the result. A
    /// state is zero at first. `step` counts the updates of this parameter from 1.
    ///
    /// Your rule may call another rule for some parameters, such as AdamW for everything but matrices. The rules
    /// of this crate also take f16 and bf16, with f32 states. `max_grad_norm` of LAMB is the business of the optimizer
    /// and has no effect here.
    ///
    /// # Errors
    /// An error ends the step. The parameters before this one are already updated then. The rules of this crate return
    /// [`Error::InvalidArgument`] for tensors that do not fit each other.
    fn update(&self, parameter: &Tensor, gradient: &Tensor, states: &mut [Tensor], step: u64) -> Result<Tensor>;

    /// The kernels that run instead of [`update`](Self::update).
    #[doc(hidden)]
    fn fused(&self) -> Option<Fused<'_>> {
        None
    }
}

/// Refuses options that `rule` refuses, and names under which its state could not be saved.
pub(super) fn check<R: UpdateRule>(rule: &R) -> Result<()> {
    rule.check()?;
    not_negative("learning_rate", rule.learning_rate())?;
    let states = rule.states();
    for (index, name) in states.iter().enumerate() {
        let taken = *name == "step" || states[..index].contains(name);
        if taken || name.is_empty() || name.contains(['.', '@']) {
            let reason = format!(
                "{} has a state named {name:?}: names must differ from each other and from \"step\", and must not be \
                 empty or contain '.' or '@'",
                R::NAME
            );
            return Err(Error::invalid("states", reason));
        }
    }
    Ok(())
}

/// The factor that scales gradients with norm `norm` down to the limit of `rule`, if it has one.
pub(super) fn limit<R: UpdateRule>(rule: &R, norm: f64) -> f64 {
    match max_grad_norm(rule) {
        Some(max) if norm > max => max / norm,
        _ => 1.,
    }
}

/// The norm of all gradients of the optimizer above which they are scaled down.
pub(super) fn max_grad_norm<R: UpdateRule>(rule: &R) -> Option<f64> {
    rule.fused().and_then(Fused::max_grad_norm)
}

/// The dtype of arithmetic and state for parameters of `dtype`; `None` if they cannot be trained.
pub(super) fn state_dtype(dtype: DType) -> Option<DType> {
    match dtype {
        DType::F64 => Some(DType::F64),
        DType::F32 | DType::F16 | DType::BF16 => Some(DType::F32),
        _ => None,
    }
}

/// Refuses values that are not finite or below zero.
pub(super) fn not_negative(argument: &'static str, value: f64) -> Result<()> {
    if value.is_finite() && value >= 0. {
        return Ok(());
    }
    Err(Error::invalid(argument, format!("it must be a finite number of at least 0, but is {value}")))
}

/// Refuses values outside `0 <= value < 1`.
pub(super) fn fraction(argument: &'static str, value: f64) -> Result<()> {
    if (0. ..1.).contains(&value) {
        return Ok(());
    }
    Err(Error::invalid(argument, format!("it must be at least 0 and below 1, but is {value}")))
}
