//! Divides gradients by the scale and detects overflows.
use crate::kernels;
use crate::tensor::borrow::slice_mut;
use crate::tensor::{Element, dispatch};
use crate::{Error, Result};
use candle_core::backend::BackendStorage;
use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, DType, InplaceOp1, Layout, Tensor, TensorId, Var, WithDType};
use std::cell::Cell;

/// The variables whose gradients decide whether a step is skipped, with their names, each once.
pub(super) type Known<'a> = [(&'a String, &'a Var)];

/// Multiplies this rank's gradients and returns whether any is infinite or NaN then; `None` if `grads` has none of them. (An
/// infinity or NaN from before stays one.)
pub(super) fn unscale(parameters: &Known, grads: &mut GradStore, factor: f64) -> Result<Option<bool>> {
    let present = |(_, var): &(&String, &Var)| grads.get(var).is_some();
    let parameters: Vec<_> = parameters.iter().copied().filter(present).collect();
    // Check all before changing any.
    if let Some((name, _)) = parameters.iter().find(|(_, var)| grads.get(var).map(Tensor::dtype) == Some(DType::F16)) {
        let reason = "its gradient is in f16, which cannot hold the divided values: make the variable in f32, with \
                      Precision::Half for a model in f16, and without keep_low_precision_grads";
        return Err(Error::parameter(*name, reason));
    }
    let mut overflow = false;
    // GPU gradients are checked together, with one wait for the result.
    let mut on_gpu = Vec::new();
    // Without a kernel, a sum over all gradients of zeros, or NaN where they are not finite.
    let mut zeros: Option<Tensor> = None;
    for (_, var) in &parameters {
        let Some(grad) = grads.get(var) else { continue };
        if grad.device().is_cpu() && grad.is_contiguous() && grad.elem_count() > 0 {
            let scaling = Unscale { factor, overflow: Cell::new(false) };
            grad.inplace_op1(&scaling)?;
            overflow |= scaling.overflow.get();
        } else if kernels::take(grad.device(), grad.dtype()) {
            let contiguous = grad.detach().contiguous()?;
            if !grad.is_contiguous() {
                grads.insert(var, contiguous.clone());
            }
            on_gpu.push(contiguous);
        } else {
            let grad = grad.detach().affine(factor, 0.0)?;
            let zero = grad.sub(&grad)?.sum_all()?.to_dtype(DType::F32)?;
            zeros = Some(match zeros {
                Some(zeros) => (&zeros + zero.to_device(zeros.device())?)?,
                None => zero,
            });
            grads.insert(var, grad);
        }
    }
    if !on_gpu.is_empty() {
        let extent = kernels::rescale_measured(&on_gpu.iter().collect::<Vec<_>>(), factor)?;
        overflow |= !extent.largest.is_finite();
    }
    if let Some(zeros) = zeros {
        overflow |= zeros.to_scalar::<f32>()? != 0.0;
    }
    Ok((!parameters.is_empty()).then_some(overflow))
}

/// The same by kernels, which do not wait: the verdict is on the GPU. `None`, and nothing happens, if gradients are not all on one GPU, of
/// one dtype, and contiguous.
pub(super) fn unscale_on_gpu(parameters: &Known, grads: &GradStore, factor: f64) -> Result<Option<Tensor>> {
    let gradients = parameters.iter().filter_map(|(_, var)| grads.get(var));
    let fits = |gradient: &Tensor| {
        let may_be = gradient.dtype() != DType::F16 && gradient.is_contiguous();
        may_be && kernels::take(gradient.device(), gradient.dtype())
    };
    let gradients: Option<Vec<Tensor>> = gradients.map(|gradient| fits(gradient).then(|| gradient.detach())).collect();
    let Some(gradients) = gradients else { return Ok(None) };
    Ok(kernels::rescale_judged(&gradients.iter().collect::<Vec<_>>(), factor)?)
}

/// Multiplies the gradients of everything else as well, such as inputs and variables that belong to no model: no gradient in the store may
/// stay scaled. Those in f16 become f32. `is_done` says which were multiplied before, or are no gradients. Nobody asks whether they are
/// finite: those of constants need not be.
pub(super) fn unscale_others(grads: &mut GradStore, factor: f64, is_done: impl Fn(TensorId) -> bool) -> Result<()> {
    let others: Vec<TensorId> = grads.get_ids().copied().filter(|id| !is_done(*id)).collect();
    for id in others {
        let Some(gradient) = grads.get_id(id).map(Tensor::detach) else { continue };
        let wide = match gradient.dtype() {
            DType::F16 => gradient.to_dtype(DType::F32)?,
            DType::F32 | DType::F64 | DType::BF16 => gradient,
            _ => continue,
        };
        // Not in place, since others may hold it.
        grads.insert_id(id, wide.affine(factor, 0.)?);
    }
    Ok(())
}

/// Multiplies a tensor by a factor, and records whether it contains an infinity or NaN afterwards.
struct Unscale {
    factor: f64,
    overflow: Cell<bool>,
}

impl InplaceOp1 for Unscale {
    fn name(&self) -> &'static str {
        "unscale"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        dispatch!(storage.dtype(), self.name(), T => {
            type Acc = <T as Element>::Real;
            let factor = Acc::from_f64(self.factor);
            let mut finite = true;
            for value in slice_mut::<T>(storage, layout)? {
                *value = T::narrow(value.widen() * factor);
                finite &= value.widen().is_finite();
            }
            self.overflow.set(!finite);
            Ok(())
        })
    }
}
