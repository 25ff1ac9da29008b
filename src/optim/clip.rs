//! Gradient clipping.
use super::sums::{largest, sum_of_squares};
use crate::ddp::gradients::left_out::is_skipped;
use crate::ddp::gradients::steps::Steps;
use crate::ddp::{first_kept, gradients::scaled};
use crate::kernels;
use crate::tensor::borrow::{with_slice, with_slice_mut};
use crate::tensor::{Element, dispatch};
use crate::variables::Parameters;
use crate::{Error, Result};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var, WithDType};

/// The norm of all gradients together. PyTorch's other norms, such as the 1-norm, are not supported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum NormType {
    /// The square root of the sum of the squares.
    #[default]
    L2,
    /// The largest absolute value.
    Inf,
}

/// Further arguments of PyTorch's `clip_grad_norm_`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClipOptions {
    /// Default: L2.
    pub norm_type: NormType,
    /// Whether an infinite or NaN norm is an error that leaves the gradients unchanged. Default: false: the gradients
    /// are scaled by such a norm too, as in PyTorch.
    pub error_if_nonfinite: bool,
}

/// [`clip_grad_norm_with`] for the L2 norm. [`Optimizer::clip_grad_norm`](super::Optimizer::clip_grad_norm) does this
/// for all parameters of an optimizer, and is required for a [sharded](crate::Sharding)
/// model.
///
/// # Errors
/// As [`clip_grad_norm_with`].
pub fn clip_grad_norm(grads: &mut GradStore, parameters: impl Into<Parameters>, max_norm: f64) -> Result<Tensor> {
    clip_grad_norm_with(grads, parameters, max_norm, ClipOptions::default())
}

/// Scales the gradients of `parameters` by `max_norm / (norm + 1e-6)` if that is below 1, and returns the norm that all of
/// them had together, a scalar in f64: PyTorch's `clip_grad_norm_`. Variables without a gradient are ignored.
///
/// On one GPU, with gradients of one dtype and without `error_if_nonfinite`, only a program that reads the norm, by
/// `norm.to_scalar::<f64>()?`, waits for the GPU.
///
/// Contiguous gradients are changed in place, and so is every tensor that shares their storage. With gradients from
/// `ddp.backward`, which are the same on all ranks, every rank computes the same norm. Gradients of [ignored](crate::Role::Ignored)
/// parameters, which differ between ranks, are scaled by the same factor and do not count in the norm, or the averaged parameters
/// would part. If all of `parameters` are ignored, the norm is taken over this rank's gradients.
///
/// # Errors
/// Returns [`Error::InvalidArgument`] for a negative or NaN `max_norm`, if none of `parameters` has a gradient, if the
/// optimizer of a [sharded](crate::Sharding) model keeps the gradient of one of them, and, with
/// `error_if_nonfinite`, for a norm that is not finite; [`Error::GradScaler`] for gradients that are still multiplied by
/// the scale of a [`GradScaler`](crate::amp::GradScaler).
pub fn clip_grad_norm_with(
    grads: &mut GradStore,
    parameters: impl Into<Parameters>,
    max_norm: f64,
    options: ClipOptions,
) -> Result<Tensor> {
    clip(grads, &variables(parameters), max_norm, options)
}

fn variables(parameters: impl Into<Parameters>) -> Vec<Var> {
    parameters.into().into_iter().map(|(_, var)| var).collect()
}

pub(super) fn clip(grads: &mut GradStore, vars: &[Var], max_norm: f64, options: ClipOptions) -> Result<Tensor> {
    check_max_norm(max_norm)?;
    scaled::check_unscaled(grads, "clip_grad_norm")?;
    if is_skipped(grads) {
        return as_tensor(finite_norm(f64::NAN, options)?, vars);
    }
    check_any_gradient(grads, vars)?;
    let measured = without_ignored(grads, vars.iter().collect(), |var| var);
    if measured.len() == vars.len()
        && !options.error_if_nonfinite
        && let Some(norm) = clip_on_gpu(grads, vars, max_norm, options.norm_type)?
    {
        return Ok(norm);
    }
    let norm = norm(measured.into_iter().filter_map(|var| grads.get(var)), options.norm_type)?;
    let norm = finite_norm(norm, options)?;
    scale(grads, vars, coefficient(norm, max_norm))?;
    as_tensor(norm, vars)
}

/// A norm that the host knows, as a tensor where a GPU's own would be.
pub(super) fn as_tensor(norm: f64, vars: &[Var]) -> Result<Tensor> {
    let gpu = vars.first().map(|var| var.device()).filter(|device| device.is_cuda());
    Ok(Tensor::new(norm, gpu.unwrap_or(&Device::Cpu))?)
}

/// Scales the gradients of these variables.
pub(super) fn scale(grads: &mut GradStore, vars: &[Var], scale: f64) -> Result<()> {
    if scale == 1. {
        return Ok(());
    }
    change(grads, vars, |gradient| gradient * scale, Change::Scale(scale))
}

/// Refuses a norm that is not finite, if the options ask for that.
fn finite_norm(norm: f64, options: ClipOptions) -> Result<f64> {
    if options.error_if_nonfinite && !norm.is_finite() {
        let reason = format!(
            "the norm of the gradients is {norm}, so they cannot be clipped: skip this step, or lower the learning rate \
             or the loss scale"
        );
        return Err(Error::invalid("grads", reason));
    }
    Ok(norm)
}

/// On one GPU, a kernel decides whether to scale, so that neither waits for the other. Returns `None` elsewhere.
fn clip_on_gpu(grads: &GradStore, vars: &[Var], max_norm: f64, norm_type: NormType) -> Result<Option<Tensor>> {
    let gradients = vars.iter().filter_map(|var| grads.get(var)).filter(|gradient| gradient.elem_count() > 0);
    let fits = |gradient: &Tensor| kernels::take(gradient.device(), gradient.dtype()) && gradient.is_contiguous();
    let gradients: Option<Vec<Tensor>> = gradients.map(|gradient| fits(gradient).then(|| gradient.detach())).collect();
    let Some(gradients) = gradients.filter(|gradients| !gradients.is_empty()) else { return Ok(None) };
    Ok(kernels::clip(&gradients.iter().collect::<Vec<_>>(), max_norm, norm_type == NormType::Inf)?)
}

pub(super) fn check_max_norm(max_norm: f64) -> Result<()> {
    if max_norm.is_nan() || max_norm < 0. {
        return Err(Error::invalid("max_norm", format!("it must be at least 0, but is {max_norm}")));
    }
    Ok(())
}

/// The `items` whose variables' gradients are the same on all ranks; all of them if there are none.
pub(super) fn without_ignored<'a, T: Copy>(
    grads: &GradStore,
    items: Vec<T>,
    variable: impl Fn(T) -> &'a Var,
) -> Vec<T> {
    let models = Steps::of(grads);
    let is_ignored = Steps::are_ignored(&models);
    let averaged: Vec<T> = items.iter().copied().filter(|item| !is_ignored(variable(*item))).collect();
    let has_gradient = |item: &T| grads.get(variable(*item)).is_some();
    if averaged.iter().any(has_gradient) { averaged } else { items }
}

/// A call that would clip nothing, or only what no optimizer keeps, is a mistake.
fn check_any_gradient(grads: &GradStore, vars: &[Var]) -> Result<()> {
    if !vars.is_empty() && vars.iter().all(|var| grads.get(var).is_none()) {
        let reason = "none of the parameters has a gradient in it: give the store that `backward` returned for their model. (If \
                      the model is sharded, its optimizer keeps the gradients itself: call its `clip_grad_norm`)";
        return Err(Error::invalid("grads", reason));
    }
    if let Some(name) = first_kept(grads, vars.iter()) {
        let reason = format!(
            "it has no gradient of {name}, which the optimizer of its sharded model keeps: call the optimizer's `clip_grad_norm`, and clip other \
             parameters, such as ignored ones, separately"
        );
        return Err(Error::invalid("grads", reason));
    }
    Ok(())
}

/// The factor for gradients of norm `norm`; NaN if the norm is NaN.
pub(super) fn coefficient(norm: f64, max_norm: f64) -> f64 {
    let scale = max_norm / (norm + 1e-6);
    if scale >= 1. { 1. } else { scale }
}

/// Limits every element of the gradients of `parameters` to the range from `-clip_value` to `clip_value`: PyTorch's
/// `clip_grad_value_`. Contiguous gradients are changed in place.
///
/// # Errors
/// Returns [`Error::InvalidArgument`] for a negative or NaN `clip_value`, or if none of `parameters` has a gradient, and
/// [`Error::GradScaler`] as [`clip_grad_norm_with`] does.
pub fn clip_grad_value(grads: &mut GradStore, parameters: impl Into<Parameters>, clip_value: f64) -> Result<()> {
    let vars = variables(parameters);
    if clip_value.is_nan() || clip_value < 0. {
        return Err(Error::invalid("clip_value", format!("it must be at least 0, but is {clip_value}")));
    }
    scaled::check_unscaled(grads, "clip_grad_value")?;
    if is_skipped(grads) {
        return Ok(());
    }
    check_any_gradient(grads, &vars)?;
    change(grads, &vars, |gradient| gradient.clamp(-clip_value, clip_value), Change::Clamp(clip_value))
}

#[derive(Clone, Copy)]
enum Change {
    Scale(f64),
    Clamp(f64),
}

/// Changes gradients in place if there is a kernel, and otherwise replaces them by the result of `otherwise`.
fn change(
    grads: &mut GradStore,
    vars: &[Var],
    otherwise: impl Fn(&Tensor) -> candle_core::Result<Tensor>,
    change: Change,
) -> Result<()> {
    let mut on_gpu = Vec::new();
    for var in vars {
        let Some(gradient) = grads.get(var) else { continue };
        if kernels::take(gradient.device(), gradient.dtype()) {
            let contiguous = gradient.detach().contiguous()?;
            if !gradient.is_contiguous() {
                grads.insert(var, contiguous.clone());
            }
            on_gpu.push(contiguous);
            continue;
        }
        let in_place = gradient.device().is_cpu() && gradient.is_contiguous();
        let done = in_place
            && dispatch!(gradient.dtype(), E => { change_in_place::<E>(gradient, change)?; true }, else => false);
        if !done {
            let changed = otherwise(gradient)?.detach();
            grads.insert(var, changed);
        }
    }
    if on_gpu.is_empty() {
        return Ok(());
    }
    let on_gpu: Vec<&Tensor> = on_gpu.iter().collect();
    match change {
        Change::Scale(scale) => kernels::rescale(&on_gpu, scale)?,
        Change::Clamp(limit) => kernels::clamp(&on_gpu, limit)?,
    }
    Ok(())
}

fn change_in_place<E: Element>(gradient: &Tensor, change: Change) -> Result<()> {
    let real = E::Real::from_f64;
    Ok(match change {
        Change::Scale(scale) => {
            let scale = real(scale);
            with_slice_mut::<E>(gradient, |values| {
                values.iter_mut().for_each(|value| *value = E::narrow(value.widen() * scale));
            })
        }
        Change::Clamp(limit) => {
            let (low, high) = (real(-limit), real(limit));
            // A NaN stays NaN, since both comparisons are false.
            let clamp = |x: E::Real| {
                if x < low {
                    low
                } else if x > high {
                    high
                } else {
                    x
                }
            };
            with_slice_mut::<E>(gradient, |values| {
                values.iter_mut().for_each(|value| *value = E::narrow(clamp(value.widen())));
            })
        }
    }?)
}

/// The norm of all `gradients` together; NaN if any element is NaN.
pub(super) fn norm<'a>(gradients: impl Iterator<Item = &'a Tensor>, norm_type: NormType) -> Result<f64> {
    let total = total(gradients, norm_type)?;
    Ok(match norm_type {
        NormType::L2 => total.sqrt(),
        NormType::Inf => total,
    })
}

/// The sum of squares, or the largest absolute value, of all elements; NaN if any element is NaN.
pub(super) fn total<'a>(gradients: impl Iterator<Item = &'a Tensor>, norm_type: NormType) -> Result<f64> {
    let mut total = 0f64;
    let mut add = |part: f64| {
        total = match norm_type {
            NormType::L2 => total + part,
            NormType::Inf if part.is_nan() || total.is_nan() => f64::NAN,
            NormType::Inf => total.max(part),
        };
    };
    let mut on_gpu = Vec::new();
    for gradient in gradients.filter(|gradient| gradient.elem_count() > 0) {
        if kernels::take(gradient.device(), gradient.dtype()) {
            on_gpu.push(gradient.contiguous()?);
        } else {
            add(part(gradient, norm_type)?);
        }
    }
    if !on_gpu.is_empty() {
        let extent = kernels::measure(&on_gpu.iter().collect::<Vec<_>>())?;
        add(match norm_type {
            NormType::L2 => extent.squares,
            NormType::Inf => extent.largest,
        });
    }
    Ok(total)
}

/// The sum of squares or the largest absolute value of one gradient.
fn part(gradient: &Tensor, norm_type: NormType) -> Result<f64> {
    if gradient.device().is_cpu() {
        let contiguous = gradient.contiguous()?;
        return dispatch!(gradient.dtype(), E => Ok(match norm_type {
            NormType::L2 => with_slice(&contiguous, |values| Ok(sum_of_squares::<E>(values)))?,
            NormType::Inf => with_slice(&contiguous, |values| Ok(largest::<E>(values)))?,
        }), else => composite(gradient, norm_type));
    }
    composite(gradient, norm_type)
}

/// Like `part`, from candle's operations, for other devices and dtypes.
fn composite(gradient: &Tensor, norm_type: NormType) -> Result<f64> {
    let gradient = match gradient.dtype() {
        DType::F64 => gradient.detach(),
        _ => gradient.detach().to_dtype(DType::F32)?,
    };
    let squares = gradient.sqr()?.sum_all()?.to_dtype(DType::F64)?.to_scalar::<f64>()?;
    Ok(match norm_type {
        NormType::L2 => squares,
        NormType::Inf if squares.is_nan() => f64::NAN,
        NormType::Inf => gradient.abs()?.flatten_all()?.max(0)?.to_dtype(DType::F64)?.to_scalar::<f64>()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_and_candles_operations_measure_the_same() {
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            let tensor = Tensor::arange(-7f32, 5., &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            let tensor = tensor.reshape((3, 4)).unwrap().t().unwrap();
            for (norm_type, expected) in [(NormType::L2, 170.), (NormType::Inf, 7.)] {
                assert_eq!(part(&tensor, norm_type).unwrap(), expected, "{dtype:?}");
                assert_eq!(composite(&tensor, norm_type).unwrap(), expected, "{dtype:?}");
            }
        }
    }
}
