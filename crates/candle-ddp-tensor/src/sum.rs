//! Sums of two tensors, in one pass over memory. candle's own sum of f16 and bf16 converts one number at a time.
use crate::borrow::with_slice;
use crate::element::DTYPES;
use crate::kernels::{self, Address, Grid, Kernel, Launch, Output};
use crate::memory_format::MemoryFormat;
use crate::parallel::Each;
use crate::{Element, dispatch, vectorise};
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, Device, Result, Shape, Storage, Tensor, WithDType};
use rayon::prelude::*;

/// The number of elements that a thread takes at a time.
const BLOCK_ELEMENTS: usize = 1 << 14;

/// The sum of two tensors that candle does not track: of gradients, for example. It is in channels last if one of them is.
pub(crate) fn sum(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    if a.shape() != b.shape() || !is_fast(a, b) {
        return a.add(b);
    }
    let format = match MemoryFormat::of(a) {
        MemoryFormat::Contiguous => MemoryFormat::of(b),
        format => format,
    };
    let (storage, shape) = values(&format.stored(a)?, &format.stored(b)?)?;
    format.view(&Tensor::from_storage(storage, shape, BackpropOp::none(), false))
}

/// Whether [`values`] takes the two.
pub(crate) fn is_fast(a: &Tensor, b: &Tensor) -> bool {
    a.dims().ends_with(b.dims()) && takes(a, b)
}

/// Whether there are loops or kernels for these dtypes and devices.
pub(crate) fn takes(a: &Tensor, b: &Tensor) -> bool {
    let alike = a.dtype() == b.dtype() && a.device().same_device(b.device());
    alike && (a.device().is_cpu() && DTYPES.contains(&a.dtype()) || kernels::take(a.device(), a.dtype()))
}

/// The sum of two contiguous tensors of a floating-point dtype. `b` has the last dimensions of `a`, and is repeated for the others.
pub(crate) fn values(a: &Tensor, b: &Tensor) -> Result<(Storage, Shape)> {
    if let Device::Cuda(device) = a.device() {
        return on_cuda(device, a, b);
    }
    dispatch!(a.dtype(), "add", T => with_slice::<T, _>(a, |a_values| with_slice::<T, _>(b, |b_values| {
        let values = T::to_cpu_storage_owned(added(a_values, b_values));
        Ok((Storage::Cpu(values), a.shape().clone()))
    })))
}

/// The sum of two contiguous tensors on CPUs, of which each element of the second is added to `each` neighbours of the first. It is repeated for
/// the others.
pub(crate) fn with_spread(a: &Tensor, b: &Tensor, each: usize) -> Result<(Storage, Shape)> {
    dispatch!(a.dtype(), "add", T => with_slice::<T, _>(a, |a_values| with_slice::<T, _>(b, |b_values| {
        let mut sums = vec![T::from_f64(0.0); a_values.len()];
        let rows = (BLOCK_ELEMENTS / each).max(1);
        let blocks = sums.par_chunks_mut(rows * each).zip(a_values.par_chunks(rows * each)).enumerate();
        blocks.for_each(|(block, (sums, a))| add_spread(sums, a, b_values, (block * rows, each)));
        Ok((Storage::Cpu(T::to_cpu_storage_owned(sums)), a.shape().clone()))
    })))
}

fn add_spread<T: Element>(sums: &mut [T], a: &[T], b: &[T], (first, each): (usize, usize)) {
    vectorise!(move || {
        for (row, (sums, a)) in sums.chunks_exact_mut(each).zip(a.chunks_exact(each)).enumerate() {
            let b = b[(first + row) % b.len()].widen();
            sums.iter_mut().zip(a).for_each(|(sum, a)| *sum = T::narrow(a.widen() + b));
        }
    });
}

fn on_cuda(device: &CudaDevice, a: &Tensor, b: &Tensor) -> Result<(Storage, Shape)> {
    let (dtype, count) = (a.dtype(), a.elem_count());
    let sum = Output::new(device, dtype, a.shape())?;
    let tensors = &[kernels::address(a)?, kernels::address(b)?, sum.address()?];
    let vector = Address::vector(tensors, b.elem_count(), dtype);
    let (grid, numbers) = (Grid::Threads(count / vector), &[count, vector, b.elem_count()]);
    kernels::launch(device, Launch { kernel: Kernel::Add, dtype, grid, tensors, numbers, reals: &[] })?;
    Ok(sum.into_result())
}

fn added<T: Element>(a: &[T], b: &[T]) -> Vec<T> {
    let mut sums = vec![T::from_f64(0.0); a.len()];
    let add = |sums: &mut [T], a: &[T], b: &[T]| {
        vectorise!(move || {
            for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
                *sum = T::narrow(a.widen() + b.widen());
            }
        });
    };
    if a.len() == b.len() {
        let blocks = sums.par_chunks_mut(BLOCK_ELEMENTS).zip(a.par_chunks(BLOCK_ELEMENTS));
        blocks.zip(b.par_chunks(BLOCK_ELEMENTS)).each(|((sums, a), b)| add(sums, a, b));
    } else {
        let row = b.len().max(1);
        let block = row * (BLOCK_ELEMENTS / row).max(1);
        sums.par_chunks_mut(block).zip(a.par_chunks(block)).each(|(sums, a)| {
            sums.chunks_mut(row).zip(a.chunks(row)).for_each(|(sums, a)| add(sums, a, b));
        });
    }
    sums
}
