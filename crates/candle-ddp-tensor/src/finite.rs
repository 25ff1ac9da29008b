//! Infinities and NaNs in tensors.
use crate::borrow::with_slice;
use crate::{Element, Result, dispatch, kernels, vectorise};
use candle_core::{DType, Tensor, WithDType};

/// `a NaN` if there is one in `tensor`, `an infinity` if there is only that, and otherwise None, as for integers. On a GPU this waits for
/// its elements.
pub fn non_finite(tensor: &Tensor) -> Result<Option<&'static str>> {
    if tensor.elem_count() == 0 || !tensor.dtype().is_float() {
        return Ok(None);
    }
    if tensor.device().is_cpu() && tensor.is_contiguous() {
        return Ok(
            dispatch!(tensor.dtype(), E => with_slice::<E, _>(tensor, |values| Ok(among(values)))?, else => None),
        );
    }
    // Zero times such a value is NaN, and so is every sum that contains it.
    let tensor = tensor.detach();
    let zeros = tensor.affine(0., 0.)?.sum_all()?.to_dtype(DType::F32)?.to_scalar::<f32>()?;
    if !zeros.is_nan() {
        return Ok(None);
    }
    let is_nan = tensor.ne(&tensor)?.to_dtype(DType::F32)?.sum_all()?.to_scalar::<f32>()? > 0.;
    Ok(Some(if is_nan { "a NaN" } else { "an infinity" }))
}

/// Whether a NaN or an infinity is in any of the tensors. On a GPU this waits once, if they are contiguous.
pub fn any_non_finite(tensors: &[&Tensor]) -> Result<bool> {
    let by_kernel = |tensor: &&&Tensor| kernels::take(tensor.device(), tensor.dtype()) && tensor.is_contiguous();
    let tensors = tensors.iter().filter(|tensor| tensor.elem_count() > 0);
    let (on_gpu, others): (Vec<&Tensor>, Vec<&Tensor>) = tensors.partition(by_kernel);
    if !on_gpu.is_empty() && !kernels::measure(&on_gpu)?.largest.is_finite() {
        return Ok(true);
    }
    for tensor in others {
        if non_finite(tensor)?.is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// A pair on the GPU whose second number is finite if all elements of the tensors are. `None` unless they are contiguous, on one GPU and of
/// one dtype. Does not wait.
pub fn judge(tensors: &[&Tensor]) -> Result<Option<Tensor>> {
    let tensors: Vec<&Tensor> = tensors.iter().copied().filter(|tensor| tensor.elem_count() > 0).collect();
    let by_kernel = |tensor: &&Tensor| kernels::take(tensor.device(), tensor.dtype()) && tensor.is_contiguous();
    if tensors.iter().all(by_kernel) { kernels::judge(&tensors) } else { Ok(None) }
}

fn among<E: Element>(values: &[E]) -> Option<&'static str> {
    // A block is judged at once, without branches.
    const BLOCK: usize = 1024;
    let is_finite = |block: &[E]| {
        vectorise!(move || {
            block.iter().fold(true, |finite, value| {
                // Zero times any other value is NaN.
                let zero = E::Real::default();
                finite & (value.widen() * zero == zero)
            })
        })
    };
    let first = values.chunks(BLOCK).position(|block| !is_finite(block))?;
    let is_nan = values[first * BLOCK..].iter().any(|value| value.widen().to_f64().is_nan());
    Some(if is_nan { "a NaN" } else { "an infinity" })
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn one_value_anywhere_is_found() {
        let (nan, infinity) = (f64::NAN, f64::INFINITY);
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            for (place, other, expected) in [
                (None, 1., None),
                (Some(0), nan, Some("a NaN")),
                (Some(2499), -infinity, Some("an infinity")),
                (Some(1500), infinity, Some("an infinity")),
                (Some(1024), nan, Some("a NaN")),
            ] {
                let mut values = vec![1e-4; 2500];
                if let Some(place) = place {
                    values[place] = other;
                }
                let tensor = Tensor::from_vec(values, (50, 50), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
                assert_eq!(non_finite(&tensor).unwrap(), expected, "{dtype:?}");
                assert_eq!(non_finite(&tensor.t().unwrap()).unwrap(), expected, "{dtype:?}, transposed");
            }
        }
        let both = Tensor::new(&[f32::INFINITY, f32::NAN], &Device::Cpu).unwrap();
        assert_eq!(non_finite(&both).unwrap(), Some("a NaN"));
        for dtype in [DType::U32, DType::F32] {
            assert_eq!(non_finite(&Tensor::zeros((0, 3), dtype, &Device::Cpu).unwrap()).unwrap(), None);
        }
        assert_eq!(non_finite(&Tensor::ones(3, DType::I64, &Device::Cpu).unwrap()).unwrap(), None);
    }
}
