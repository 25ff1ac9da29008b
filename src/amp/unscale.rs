//! Divides gradients by the scale and detects overflows.
use crate::kernels;
use crate::tensor::borrow::slice_mut;
use crate::tensor::{Element, dispatch};
use crate::{Error, Result};
use candle_core::backend::BackendStorage;
use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, DType, InplaceOp1, Layout, Tensor, Var, WithDType};
use std::cell::Cell;

/// Multiplies this rank's gradients and returns whether any is infinite or NaN then; `None` if `grads` has none of them. (An
/// infinity or NaN from before stays one.)
pub(super) fn unscale(parameters: &[(String, Var)], grads: &mut GradStore, factor: f64) -> Result<Option<bool>> {
    let present = |(_, var): &&(String, Var)| grads.get(var).is_some();
    let parameters: Vec<_> = parameters.iter().filter(present).collect();
    // Check all before changing any.
    if let Some((name, _)) = parameters.iter().find(|(_, var)| grads.get(var).map(Tensor::dtype) == Some(DType::F16)) {
        let reason = "its gradient is in f16, which cannot hold the divided values: make the variable in f32, and let \
                      mixed_precision.param_dtype be F16, without keep_low_precision_grads";
        return Err(Error::parameter(name, reason));
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
pub(super) fn unscale_on_gpu(parameters: &[(String, Var)], grads: &GradStore, factor: f64) -> Result<Option<Tensor>> {
    let gradients = parameters.iter().filter_map(|(_, var)| grads.get(var));
    let fits = |gradient: &Tensor| {
        let may_be = gradient.dtype() != DType::F16 && gradient.is_contiguous();
        may_be && kernels::take(gradient.device(), gradient.dtype())
    };
    let gradients: Option<Vec<Tensor>> = gradients.map(|gradient| fits(gradient).then(|| gradient.detach())).collect();
    let Some(gradients) = gradients else { return Ok(None) };
    Ok(kernels::rescale_judged(&gradients.iter().collect::<Vec<_>>(), factor)?)
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
