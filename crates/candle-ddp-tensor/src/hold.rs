//! Tensors whose memory comes and goes while a program holds them.
use crate::borrow::slice;
use crate::copy::snapshot;
use crate::dispatch;
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{CpuStorage, CudaStorage, InplaceOp1, InplaceOp2, Layout, Result, Shape, Tensor, WithDType, bail};

/// Frees the memory of `tensor`, which its views share. The functions of this project refuse it until [`fill`] gives it memory again;
/// candle's own operations must not get it.
pub fn release(tensor: &Tensor) -> Result<()> {
    tensor.inplace_op1(&Release)
}

/// Gives the contiguous `tensor` new memory with the elements of the contiguous `source`, of the same dtype and device.
pub fn fill(tensor: &Tensor, source: &Tensor) -> Result<()> {
    if source.elem_count() != tensor.elem_count() || source.dtype() != tensor.dtype() {
        bail!("a tensor of {} {:?} cannot be filled from {source:?}", tensor.elem_count(), tensor.dtype())
    }
    tensor.inplace_op2(source, &Fill)
}

struct Release;

impl InplaceOp1 for Release {
    fn name(&self) -> &'static str {
        "release"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        dispatch!(storage.dtype(), T => *storage = T::to_cpu_storage_owned(Vec::new()), else => bail!("no dtype of parameters"));
        Ok(())
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> Result<()> {
        // Not every driver has allocations without elements.
        *storage = storage.device().zeros_impl(&Shape::from(1), storage.dtype())?;
        Ok(())
    }
}

struct Fill;

impl InplaceOp2 for Fill {
    fn name(&self) -> &'static str {
        "fill"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout, source: &CpuStorage, layout: &Layout) -> Result<()> {
        dispatch!(source.dtype(), T => *storage = T::to_cpu_storage_owned(slice::<T>(source, layout)?.to_vec()), else => bail!("no dtype of parameters"));
        Ok(())
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout, source: &CudaStorage, layout: &Layout) -> Result<()> {
        *storage = snapshot(source, layout, source.dtype())?.0;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn memory_comes_and_goes() -> Result<()> {
        let values = Tensor::arange(0f32, 12., &Device::Cpu)?;
        let tensor = values.narrow(0, 0, 6)?.reshape((2, 3))?.copy()?;
        let view = tensor.t()?;
        release(&tensor)?;
        assert!(crate::borrow::with_slice::<f32, _>(&tensor, |_| Ok(())).is_err());
        fill(&tensor, &values.narrow(0, 6, 6)?)?;
        assert_eq!(tensor.to_vec2::<f32>()?, [[6., 7., 8.], [9., 10., 11.]]);
        assert_eq!(view.to_vec2::<f32>()?, [[6., 9.], [7., 10.], [8., 11.]]);
        assert!(fill(&tensor, &values).is_err());
        assert!(fill(&tensor, &values.narrow(0, 0, 6)?.to_dtype(candle_core::DType::F64)?).is_err());
        Ok(())
    }
}
