//! Writes into existing tensors: slices of buckets, replicas.
use crate::borrow::{slice, slice_mut, with_slice};
use crate::kernels::{self, Assignment, Output};
use crate::{Element, Result, dispatch, vectorise};
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{
    CpuStorage, CudaStorage, DType, Device, InplaceOp1, InplaceOp2, Layout, Shape, Storage, Tensor, WithDType,
};

type CandleResult<T> = candle_core::Result<T>;

/// Copies `source` into the contiguous `destination`, which has the same shape and device, and converts to its dtype.
pub fn copy(destination: &Tensor, source: &Tensor) -> Result<()> {
    assign(&[Assignment::plain(destination, source)])
}

/// Copies the second of each pair into the first, like [`copy`].
pub fn copy_all<'a>(pairs: impl Iterator<Item = (&'a Tensor, &'a Tensor)>) -> Result<()> {
    assign(&pairs.map(|(destination, source)| Assignment::plain(destination, source)).collect::<Vec<_>>())
}

/// Like [`copy_all`], and returns whether that changed any element. None if nobody looked, as on a GPU.
pub fn update_all<'a>(pairs: impl Iterator<Item = (&'a Tensor, &'a Tensor)>) -> Result<Option<bool>> {
    let (mut has_changed, mut others) = (false, Vec::new());
    for (destination, source) in pairs.filter(|(destination, _)| destination.elem_count() > 0) {
        match holds(destination, source)? {
            Some(true) => {}
            Some(false) => {
                copy(destination, source)?;
                has_changed = true;
            }
            None => others.push(Assignment::plain(destination, source)),
        }
    }
    assign(&others)?;
    Ok(others.is_empty().then_some(has_changed))
}

/// Whether `destination` holds the elements of `source` in its own dtype; None if that would take long to find out. A
/// comparison ends soon after the first difference, so it costs little before a copy, and less than one instead of it.
fn holds(destination: &Tensor, source: &Tensor) -> Result<Option<bool>> {
    if !destination.device().is_cpu() || !source.device().is_cpu() || !source.is_contiguous() {
        return Ok(None);
    }
    dispatch!(destination.dtype(), T => dispatch!(source.dtype(), S => {
        let same = with_slice::<T, _>(destination, |destination| {
            with_slice::<S, _>(source, |source| Ok(is_same::<T, S>(destination, source)))
        })?;
        Ok(Some(same))
    }, else => Ok(None)), else => Ok(None))
}

/// NaNs are the same.
fn is_same<T: Element, S: Element>(destination: &[T], source: &[S]) -> bool {
    const BLOCK: usize = 1024;
    destination.chunks(BLOCK).zip(source.chunks(BLOCK)).all(|(destination, source)| {
        vectorise!(|| {
            let mut differs = false;
            for (a, b) in destination.iter().zip(source) {
                let b =
                    if T::DTYPE == S::DTYPE { b.widen().to_f64() } else { T::narrow(real::<T, S>(b)).widen().to_f64() };
                let a = a.widen().to_f64();
                differs |= !((a == b) | (a.is_nan() & b.is_nan()));
            }
            !differs
        })
    })
}

/// The element in the type in which `T` is computed.
#[inline(always)]
fn real<T: Element, S: Element>(value: &S) -> T::Real {
    T::Real::from_f64(value.widen().to_f64())
}

/// Views of the flat tensor `flat` in the shapes `shapes`, which follow each other in it.
pub fn views<'a>(flat: &Tensor, shapes: impl IntoIterator<Item = &'a Shape>) -> Result<Vec<Tensor>> {
    let mut offset = 0;
    let view = |shape: &Shape| {
        let view = flat.narrow(0, offset, shape.elem_count())?.reshape(shape)?;
        offset += shape.elem_count();
        Ok(view)
    };
    shapes.into_iter().map(view).collect()
}

/// Performs all `assignments`, between floating-point dtypes or within one dtype. On a GPU, one launch performs those
/// with the same dtypes.
pub fn assign(assignments: &[Assignment]) -> Result<()> {
    let mut on_gpu = Vec::new();
    // candle mistakes some shapes without elements for ones whose elements overlap.
    let with_elements = assignments.iter().filter(|this| this.destination.elem_count() > 0);
    for this @ Assignment { destination, source, factor, accumulate } in with_elements {
        let is_plain = destination.dtype() == source.dtype() && *factor == 1.0 && !accumulate;
        let is_alone = assignments.len() == 1;
        if is_plain && (is_alone || !kernels::take(destination.device(), destination.dtype())) {
            destination.inplace_op2(source, &Copy)?;
        } else if destination.device().is_cpu() {
            let op = ScaledCopy { scale: *factor, accumulate: *accumulate };
            destination.inplace_op2(&source.contiguous()?, &op)?;
        } else {
            on_gpu.push((*this, source.contiguous()?));
        }
    }
    if on_gpu.is_empty() {
        return Ok(());
    }
    let on_gpu: Vec<_> = on_gpu.iter().map(|(this, source)| Assignment { source, ..*this }).collect();
    kernels::assign(&on_gpu)
}

/// Multiplies the contiguous `tensor`, of a floating-point dtype, in place.
pub fn scale(tensor: &Tensor, scale: f64) -> Result<()> {
    if scale == 1.0 {
        return Ok(());
    }
    if tensor.device().is_cuda() {
        return kernels::rescale(&[tensor], scale);
    }
    Ok(tensor.inplace_op1(&Scale(scale))?)
}

/// A contiguous copy of the elements of `storage` that `layout` selects, in dtype `dtype` and its own storage.
pub fn snapshot<S: BackendStorage>(storage: &S, layout: &Layout, dtype: DType) -> CandleResult<(S, Shape)>
where
    S::Device: BackendDevice<Storage = S>,
{
    if storage.dtype() != dtype {
        return Ok((storage.to_dtype(layout, dtype)?, layout.shape().clone()));
    }
    let mut copy = storage.device().zeros_impl(layout.shape(), storage.dtype())?;
    storage.copy_strided_src(&mut copy, 0, layout)?;
    Ok((copy, layout.shape().clone()))
}

/// Like [`snapshot`], on a GPU, where it writes the memory once.
pub fn snapshot_cuda(storage: &CudaStorage, layout: &Layout, dtype: DType) -> CandleResult<(CudaStorage, Shape)> {
    if storage.dtype() != dtype {
        return Ok((storage.to_dtype(layout, dtype)?, layout.shape().clone()));
    }
    Ok(Output::copy_of(storage, layout)?.into_parts())
}

/// A flat tensor that the caller fills before anyone reads it.
pub fn unfilled(elements: usize, dtype: DType, device: &Device) -> Result<Tensor> {
    match device {
        Device::Cuda(device) => Ok(Output::new(device, dtype, elements)?.into_tensor()),
        _ => Ok(Tensor::zeros(elements, dtype, device)?),
    }
}

/// Like [`snapshot`], of `tensor`.
pub fn snapshot_tensor(tensor: &Tensor, dtype: DType) -> CandleResult<(Storage, Shape)> {
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) if storage.dtype() != dtype && layout.is_contiguous() => {
            Ok((Storage::Cpu(converted(storage, layout, dtype)?), layout.shape().clone()))
        }
        Storage::Cpu(storage) => snapshot(storage, layout, dtype).map(|(copy, shape)| (Storage::Cpu(copy), shape)),
        Storage::Cuda(storage) => {
            snapshot_cuda(storage, layout, dtype).map(|(copy, shape)| (Storage::Cuda(copy), shape))
        }
        Storage::Metal(storage) => snapshot(storage, layout, dtype).map(|(copy, shape)| (Storage::Metal(copy), shape)),
    }
}

/// The elements in another dtype. Loops over vectors convert f16 and bf16 several times as fast as candle's.
fn converted(storage: &CpuStorage, layout: &Layout, dtype: DType) -> CandleResult<CpuStorage> {
    dispatch!(dtype, T => dispatch!(storage.dtype(), S => {
        let values = slice::<S>(storage, layout)?;
        let values: Vec<T> = vectorise!(|| values.iter().map(|value| T::narrow(real::<T, S>(value))).collect());
        Ok(T::to_cpu_storage_owned(values))
    }, else => storage.to_dtype(layout, dtype)), else => storage.to_dtype(layout, dtype))
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

struct Scale(f64);

impl InplaceOp1 for Scale {
    fn name(&self) -> &'static str {
        "scale"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> CandleResult<()> {
        dispatch!(storage.dtype(), self.name(), T => {
            let scale = <T as Element>::Real::from_f64(self.0);
            slice_mut::<T>(storage, layout)?.iter_mut().for_each(|value| *value = T::narrow(value.widen() * scale));
            Ok(())
        })
    }
}

struct ScaledCopy {
    scale: f64,
    accumulate: bool,
}

impl ScaledCopy {
    /// One pass over both, computed in f32, or in f64 if the destination is f64.
    #[inline(always)]
    fn apply<T: Element, S: Element>(&self, dst: &mut [T], src: &[S]) {
        let scale = T::Real::from_f64(self.scale);
        let value = |src: &S| real::<T, S>(src);
        let pairs = dst.iter_mut().zip(src);
        if self.accumulate {
            pairs.for_each(|(dst, src)| *dst = T::narrow((dst.widen() + value(src)) * scale));
        } else {
            pairs.for_each(|(dst, src)| *dst = T::narrow(value(src) * scale));
        }
    }
}

impl InplaceOp2 for ScaledCopy {
    fn name(&self) -> &'static str {
        "scaled-copy"
    }

    fn cpu_fwd(&self, dst: &mut CpuStorage, dst_l: &Layout, src: &CpuStorage, src_l: &Layout) -> CandleResult<()> {
        dispatch!(dst.dtype(), self.name(), T => dispatch!(src.dtype(), self.name(), S => {
            let (dst, src) = (slice_mut(dst, dst_l)?, slice(src, src_l)?);
            vectorise!(|| self.apply::<T, S>(dst, src));
            Ok(())
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    fn assign_one(destination: &Tensor, source: &Tensor, factor: f64, accumulate: bool) {
        assign(&[Assignment { destination, source, factor, accumulate }]).unwrap();
    }

    #[test]
    fn copies_convert() {
        let source = Tensor::new(&[1f64 + 1e-9, 3.0, f64::INFINITY], &Device::Cpu).unwrap();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let converted = Tensor::zeros(3, dtype, &Device::Cpu).unwrap();
            copy(&converted, &source).unwrap();
            let back = Tensor::ones(3, DType::F64, &Device::Cpu).unwrap();
            assign_one(&back, &converted, 0.5, true);
            assert_eq!(back.to_vec1::<f64>().unwrap(), [1.0, 2.0, f64::INFINITY], "{dtype:?}");
        }
    }

    #[test]
    fn updates_tell_whether_they_change_anything() {
        let values = |last: f64| {
            let values: Vec<f64> = (0..3000).map(f64::from).chain([f64::NAN, last]).collect();
            Tensor::new(values, &Device::Cpu).unwrap()
        };
        for (to, from) in [(DType::F32, DType::F32), (DType::BF16, DType::F32), (DType::F64, DType::F64)] {
            let replica = Tensor::zeros(3002, to, &Device::Cpu).unwrap();
            for (last, changes) in [(1.0, true), (1.0, false), (-0.5, true), (-0.5, false)] {
                let source = values(last).to_dtype(from).unwrap();
                assert_eq!(update_all([(&replica, &source)].into_iter()).unwrap(), Some(changes), "{to:?}, {last}");
                let held = replica.get(3001).unwrap().to_dtype(DType::F64).unwrap().to_scalar::<f64>().unwrap();
                assert_eq!(held, last);
            }
        }
        // A change that the replica's dtype cannot hold does not count.
        let replica = Tensor::ones(1, DType::BF16, &Device::Cpu).unwrap();
        let source = Tensor::new(&[1f32 + 1e-6], &Device::Cpu).unwrap();
        assert_eq!(update_all([(&replica, &source)].into_iter()).unwrap(), Some(false));
    }

    #[test]
    fn copies_scale_and_accumulate_into_a_slice() {
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            let flat = Tensor::zeros(8, dtype, &Device::Cpu).unwrap();
            let slice = flat.narrow(0, 1, 6).unwrap().reshape((2, 3)).unwrap();
            let source = Tensor::arange(0f32, 6.0, &Device::Cpu).unwrap().reshape((3, 2)).unwrap();
            let source = source.to_dtype(dtype).unwrap().t().unwrap(); // not contiguous
            assign_one(&slice, &source, 0.5, false);
            assign_one(&slice, &source, 2.0, true);
            let values = flat.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(values, [0., 0., 6., 12., 3., 9., 15., 0.], "{dtype:?}");
            scale(&slice, 0.25).unwrap();
            let values = flat.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(values, [0., 0., 1.5, 3., 0.75, 2.25, 3.75, 0.], "{dtype:?}");
            copy(&slice, &source).unwrap();
            let values = flat.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(values, [0., 0., 2., 4., 1., 3., 5., 0.], "{dtype:?}");
        }
    }
}
