//! Writing into tensors that are already there: slices of buckets, replicas.
use crate::Result;
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{CpuStorage, CudaStorage, InplaceOp2, Layout, Shape, Tensor};
use half::{bf16, f16};

type CandleResult<T> = candle_core::Result<T>;

/// Copies `source` into the contiguous `destination` of the same shape, dtype and device.
pub(super) fn copy(destination: &Tensor, source: &Tensor) -> Result<()> {
    Ok(destination.inplace_op2(source, &Copy)?)
}

/// `destination = source × scale`, or `(destination + source) × scale`; `destination` is contiguous, and both have the
/// same shape, dtype (floating point) and device.
pub(super) fn scaled_copy(destination: &Tensor, source: &Tensor, scale: f64, accumulate: bool) -> Result<()> {
    if accumulate && !destination.device().is_cpu() {
        let sum = (destination + source)?;
        return Ok(destination.inplace_op2(&sum, &ScaledCopy { scale, accumulate: false })?);
    }
    Ok(destination.inplace_op2(&source.contiguous()?, &ScaledCopy { scale, accumulate })?)
}

/// A copy of what `layout` shows of `storage`, contiguous, in storage of its own.
pub(super) fn snapshot<S: BackendStorage>(storage: &S, layout: &Layout) -> CandleResult<(S, Shape)>
where
    S::Device: BackendDevice<Storage = S>,
{
    let mut copy = storage.device().zeros_impl(layout.shape(), storage.dtype())?;
    storage.copy_strided_src(&mut copy, 0, layout)?;
    Ok((copy, layout.shape().clone()))
}

struct Copy;

impl InplaceOp2 for Copy {
    fn name(&self) -> &'static str {
        "copy"
    }

    fn cpu_fwd(&self, dst: &mut CpuStorage, dst_l: &Layout, src: &CpuStorage, src_l: &Layout) -> CandleResult<()> {
        src.copy_strided_src(dst, dst_l.start_offset(), src_l)
    }

    fn cuda_fwd(&self, dst: &mut CudaStorage, dst_l: &Layout, src: &CudaStorage, src_l: &Layout) -> CandleResult<()> {
        src.copy_strided_src(dst, dst_l.start_offset(), src_l)
    }
}

struct ScaledCopy {
    scale: f64,
    accumulate: bool,
}

impl ScaledCopy {
    /// One pass over both; `scale` returns a value times the factor.
    fn apply<T: std::marker::Copy + std::ops::Add<Output = T>>(
        &self,
        dst: &mut [T],
        src: &[T],
        scale: impl Fn(T) -> T,
    ) {
        if self.accumulate {
            dst.iter_mut().zip(src).for_each(|(dst, src)| *dst = scale(*dst + *src));
        } else {
            dst.iter_mut().zip(src).for_each(|(dst, src)| *dst = scale(*src));
        }
    }
}

impl InplaceOp2 for ScaledCopy {
    fn name(&self) -> &'static str {
        "scaled-copy"
    }

    fn cpu_fwd(&self, dst: &mut CpuStorage, dst_l: &Layout, src: &CpuStorage, src_l: &Layout) -> CandleResult<()> {
        let (Some((d0, d1)), Some((s0, s1))) = (dst_l.contiguous_offsets(), src_l.contiguous_offsets()) else {
            candle_core::bail!("scaled-copy needs contiguous tensors, got {dst_l:?} and {src_l:?}")
        };
        let scale = self.scale;
        let (dtype, src_dtype) = (dst.dtype(), src.dtype());
        match (dst, src) {
            (CpuStorage::F32(dst), CpuStorage::F32(src)) => {
                let scale = scale as f32;
                self.apply(&mut dst[d0..d1], &src[s0..s1], |x| x * scale);
            }
            (CpuStorage::F64(dst), CpuStorage::F64(src)) => {
                self.apply(&mut dst[d0..d1], &src[s0..s1], |x| x * scale);
            }
            (CpuStorage::F16(dst), CpuStorage::F16(src)) => {
                let scale = scale as f32;
                self.apply(&mut dst[d0..d1], &src[s0..s1], |x| f16::from_f32(x.to_f32() * scale));
            }
            (CpuStorage::BF16(dst), CpuStorage::BF16(src)) => {
                let scale = scale as f32;
                self.apply(&mut dst[d0..d1], &src[s0..s1], |x| bf16::from_f32(x.to_f32() * scale));
            }
            _ => candle_core::bail!("scaled-copy has no kernel from {src_dtype:?} to {dtype:?}"),
        }
        Ok(())
    }

    fn cuda_fwd(&self, dst: &mut CudaStorage, dst_l: &Layout, src: &CudaStorage, src_l: &Layout) -> CandleResult<()> {
        let scaled = src.affine(src_l, self.scale, 0.0)?;
        scaled.copy_strided_src(dst, dst_l.start_offset(), &Layout::contiguous(src_l.shape()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    #[test]
    fn copies_scale_and_accumulate_into_a_slice() {
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            let flat = Tensor::zeros(8, dtype, &Device::Cpu).unwrap();
            let slice = flat.narrow(0, 1, 6).unwrap().reshape((2, 3)).unwrap();
            let source = Tensor::arange(0f32, 6.0, &Device::Cpu).unwrap().reshape((3, 2)).unwrap();
            let source = source.to_dtype(dtype).unwrap().t().unwrap(); // not contiguous
            scaled_copy(&slice, &source, 0.5, false).unwrap();
            scaled_copy(&slice, &source, 2.0, true).unwrap();
            let values = flat.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(values, [0., 0., 6., 12., 3., 9., 15., 0.], "{dtype:?}");
            copy(&slice, &source).unwrap();
            let values = flat.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(values, [0., 0., 2., 4., 1., 3., 5., 0.], "{dtype:?}");
        }
    }
}
