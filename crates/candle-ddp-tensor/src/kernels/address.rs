//! Addresses of candle's tensors in GPU memory, for kernels and NCCL.
//!
//! An address is valid as long as the storage lives. It is always requested with the stream of the storage's own
//! device, which leaves candle's event tracking, if enabled, unchanged.
use crate::error::{RELEASED, gone};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::{CudaDType, CudaStorageSlice};
use candle_core::{CpuStorage, CudaDevice, CudaStorage, DType, InplaceOp1, Layout, Result, Storage, Tensor, bail};
use cudarc::driver::{DevicePtr, DevicePtrMut};
use half::{bf16, f16};
use std::cell::Cell;

/// Identifies the context and the stream of `device`, for what threads keep for each stream.
pub(super) fn stream_of(device: &CudaDevice) -> (usize, usize) {
    let stream = device.cuda_stream();
    (stream.context().cu_ctx() as usize, stream.cu_stream() as usize)
}

/// Returns the address of a contiguous tensor that will be read.
pub fn input(tensor: &Tensor) -> Result<u64> {
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cuda(storage) => read_address(storage, layout),
        _ => bail!("the tensor must be on a GPU"),
    }
}

/// Returns the address of a contiguous tensor that will be written; 0 for a tensor without elements.
pub fn output(tensor: &Tensor) -> Result<u64> {
    let locate = Locate(Cell::new(0));
    // candle considers the strides of some empty shapes overlapping.
    if tensor.elem_count() > 0 {
        tensor.inplace_op1(&locate)?;
    }
    Ok(locate.0.get())
}

/// The same code for shared and exclusive borrows.
macro_rules! address {
    ($storage:expr, $layout:expr, $part:ident) => {{
        let Some((start, end)) = $layout.contiguous_offsets() else {
            bail!("the tensor must be contiguous: {:?}", $layout)
        };
        match $storage.dtype() {
            DType::F32 => $part::<f32>($storage, start, end),
            DType::F64 => $part::<f64>($storage, start, end),
            DType::F16 => $part::<f16>($storage, start, end),
            DType::BF16 => $part::<bf16>($storage, start, end),
            DType::I64 => $part::<i64>($storage, start, end),
            DType::U32 => $part::<u32>($storage, start, end),
            DType::U8 => $part::<u8>($storage, start, end),
            RELEASED => Err(gone("an argument of a kernel is one").into()),
            dtype => bail!("tensors of dtype {dtype:?} are not supported on GPUs"),
        }
    }};
}

/// Returns the address of contiguous elements that will be read.
pub(super) fn read_address(storage: &CudaStorage, layout: &Layout) -> Result<u64> {
    fn part<T: CudaDType>(storage: &CudaStorage, start: usize, end: usize) -> Result<u64> {
        let stream = storage.device().cuda_stream();
        match storage.as_cuda_slice::<T>()?.try_slice(start..end) {
            Some(view) => Ok(view.device_ptr(&stream).0),
            None => bail!("the layout reaches beyond the storage"),
        }
    }
    address!(storage, layout, part)
}

/// Returns the address of contiguous elements that will be written.
pub(super) fn write_address(storage: &mut CudaStorage, layout: &Layout) -> Result<u64> {
    fn part<T: CudaDType>(storage: &mut CudaStorage, start: usize, end: usize) -> Result<u64> {
        let stream = storage.device().cuda_stream();
        match storage.as_cuda_slice_mut::<T>()?.try_slice_mut(start..end) {
            Some(mut view) => Ok(view.device_ptr_mut(&stream).0),
            None => bail!("the layout reaches beyond the storage"),
        }
    }
    address!(storage, layout, part)
}

/// Frees the memory of `storage`, and leaves a byte of a dtype that no operation takes: not every driver has allocations without
/// elements.
pub fn release(storage: &mut CudaStorage) -> crate::Result<()> {
    // SAFETY: nobody reads the byte.
    let byte = unsafe { storage.device().alloc::<u8>(1) }?;
    storage.slice = CudaStorageSlice::F6E2M3(byte);
    Ok(())
}

/// An in-place operation that only determines the address of the storage.
struct Locate(Cell<u64>);

impl InplaceOp1 for Locate {
    fn name(&self) -> &'static str {
        "locate"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> Result<()> {
        bail!("the tensor must be on a GPU")
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> Result<()> {
        self.0.set(write_address(storage, layout)?);
        Ok(())
    }
}
