//! Where candle's tensors lie in the GPU's memory.
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::CudaDType;
use candle_core::{CpuStorage, CudaStorage, DType, InplaceOp1, Layout, Result, Storage, Tensor, bail};
use cudarc::driver::{DevicePtr, DevicePtrMut};
use half::{bf16, f16};
use std::cell::Cell;

/// The address of a contiguous tensor that a kernel will read.
pub(super) fn input(tensor: &Tensor) -> Result<u64> {
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cuda(storage) => read_address(storage, layout),
        _ => bail!("the tensor is not on a GPU"),
    }
}

/// The address of contiguous elements that a kernel will read.
pub(super) fn read_address(storage: &CudaStorage, layout: &Layout) -> Result<u64> {
    fn part<T: CudaDType>(storage: &CudaStorage, (start, end): (usize, usize)) -> Result<u64> {
        let stream = storage.device().cuda_stream();
        match storage.as_cuda_slice::<T>()?.try_slice(start..end) {
            Some(view) => Ok(view.device_ptr(&stream).0),
            None => bail!("the layout reaches beyond the storage"),
        }
    }
    match storage.dtype() {
        DType::F32 => part::<f32>(storage, offsets(layout)?),
        DType::F64 => part::<f64>(storage, offsets(layout)?),
        DType::F16 => part::<f16>(storage, offsets(layout)?),
        DType::BF16 => part::<bf16>(storage, offsets(layout)?),
        dtype => bail!("there is no kernel for {dtype:?}"),
    }
}

/// The address of contiguous elements that a kernel will change.
pub(super) fn write_address(storage: &mut CudaStorage, layout: &Layout) -> Result<u64> {
    fn part<T: CudaDType>(storage: &mut CudaStorage, (start, end): (usize, usize)) -> Result<u64> {
        let stream = storage.device().cuda_stream();
        match storage.as_cuda_slice_mut::<T>()?.try_slice_mut(start..end) {
            Some(mut view) => Ok(view.device_ptr_mut(&stream).0),
            None => bail!("the layout reaches beyond the storage"),
        }
    }
    match storage.dtype() {
        DType::F32 => part::<f32>(storage, offsets(layout)?),
        DType::F64 => part::<f64>(storage, offsets(layout)?),
        DType::F16 => part::<f16>(storage, offsets(layout)?),
        DType::BF16 => part::<bf16>(storage, offsets(layout)?),
        dtype => bail!("there is no kernel for {dtype:?}"),
    }
}

/// The address of a contiguous tensor that a kernel will change.
pub(super) fn output(tensor: &Tensor) -> Result<u64> {
    let locate = Locate(Cell::new(0));
    // candle takes the strides of some empty shapes for an overlap.
    if tensor.elem_count() > 0 {
        tensor.inplace_op1(&locate)?;
    }
    Ok(locate.0.get())
}

fn offsets(layout: &Layout) -> Result<(usize, usize)> {
    match layout.contiguous_offsets() {
        Some(offsets) => Ok(offsets),
        None => bail!("the tensor is not contiguous: {layout:?}"),
    }
}

/// An in-place operation that only looks where the storage is.
struct Locate(Cell<u64>);

impl InplaceOp1 for Locate {
    fn name(&self) -> &'static str {
        "locate"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> Result<()> {
        bail!("the tensor is not on a GPU")
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> Result<()> {
        self.0.set(write_address(storage, layout)?);
        Ok(())
    }
}
