//! Tensors whose memory comes and goes while a program holds them.
use crate::borrow::slice;
use crate::copy::copy_all;
use crate::dispatch;
use crate::error::{Error, RELEASED, check_storage, gone};
use crate::kernels::{self, Output};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, InplaceOp1, InplaceOp2, Layout, Result, Storage, Tensor, WithDType, bail};

/// Frees the memory of `tensor`, which its views share, until [`fill_all`] gives it memory again. Meanwhile every use is an error, either
/// `gone` or candle's, which [`explained`] turns into `gone`. On a CPU it names the `owner`.
pub fn release(tensor: &Tensor, owner: &str) -> Result<()> {
    tensor.inplace_op1(&Release(owner))
}

/// Gives each of the contiguous tensors new memory with the elements of its contiguous source, of the same dtype and device. After an
/// error, those on a GPU may hold anything.
pub fn fill_all(tensors: &[(&Tensor, Tensor)]) -> crate::Result<()> {
    for (tensor, source) in tensors {
        if source.elem_count() != tensor.elem_count() || source.dtype() != tensor.dtype() {
            let reason =
                format!("a tensor of {} {:?} cannot be filled from {source:?}", tensor.elem_count(), tensor.dtype());
            return Err(crate::Error::invalid("source", reason));
        }
        tensor.inplace_op2(source, &Fill)?;
    }
    copy_all(tensors.iter().filter(|(tensor, _)| tensor.device().is_cuda()).map(|(tensor, source)| (*tensor, source)))
}

/// Refuses a tensor whose memory was released.
pub fn check(tensor: &Tensor) -> Result<()> {
    match &*tensor.storage_and_layout().0 {
        Storage::Cpu(storage) => Ok(check_storage(storage)?),
        Storage::Cuda(storage) if storage.dtype() == RELEASED => Err(gone("it is on a GPU").into()),
        _ => Ok(()),
    }
}

/// Candle's `error`, or `gone` if candle refused a released storage.
pub fn explained(error: candle_core::Error) -> candle_core::Error {
    Error::from(error).into()
}

/// Whether both tensors have the same memory.
pub fn shares(one: &Tensor, other: &Tensor) -> bool {
    let storage = |tensor: &Tensor| std::ptr::from_ref(&*tensor.storage_and_layout().0);
    std::ptr::eq(storage(one), storage(other))
}

struct Release<'a>(&'a str);

impl InplaceOp1 for Release<'_> {
    fn name(&self) -> &'static str {
        "release"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        *storage = CpuStorage::F6E2M3(self.0.as_bytes().to_vec());
        Ok(())
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> Result<()> {
        Ok(kernels::release(storage)?)
    }
}

/// Gives memory. On a CPU it has the elements of the source.
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
        *storage = Output::new(source.device(), source.dtype(), layout.shape())?.into_parts().0;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    #[test]
    fn memory_comes_and_goes() -> Result<()> {
        let values = Tensor::arange(0f32, 12., &Device::Cpu)?;
        let tensor = values.narrow(0, 0, 6)?.reshape((2, 3))?.copy()?;
        let view = tensor.t()?;
        release(&tensor, "block a")?;
        let ours = crate::borrow::with_slice::<f32, _>(&tensor, |_| Ok(())).unwrap_err();
        let candles = explained(tensor.matmul(&view).unwrap_err());
        for (error, which) in [(ours, "belongs to block a"), (candles, "mat_mul")] {
            let error = Error::from(error);
            assert!(matches!(error, Error::Base(candle_ddp_base::Error::InvalidArgument { .. })), "{error:?}");
            assert!(error.to_string().contains(which), "{error}");
        }
        fill_all(&[(&tensor, values.narrow(0, 6, 6)?)])?;
        assert_eq!(tensor.to_vec2::<f32>()?, [[6., 7., 8.], [9., 10., 11.]]);
        assert_eq!(view.to_vec2::<f32>()?, [[6., 9.], [7., 10.], [8., 11.]]);
        for source in [values.clone(), values.narrow(0, 0, 6)?.to_dtype(DType::F64)?] {
            assert!(fill_all(&[(&tensor, source)]).is_err());
        }
        Ok(())
    }
}
