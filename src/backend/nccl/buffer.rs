//! Where candle's tensors lie in the GPU's memory.
//!
//! The tensors have been [checked](crate::backend::check): contiguous, on the group's device, of a supported dtype.
use super::calls::Memory;
use candle_core::cuda_backend::CudaDType;
use candle_core::{CpuStorage, CudaStorage, DType, Error, InplaceOp1, Layout, Result, Storage, Tensor};
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut};
use cudarc::nccl::sys::ncclDataType_t;
use half::{bf16, f16};
use std::cell::Cell;

/// The memory of a tensor that will be written. `stream` is candle's.
pub(super) fn output(tensor: &Tensor, stream: &CudaStream) -> Result<Memory> {
    if tensor.elem_count() == 0 {
        // candle takes the strides of some empty shapes for an overlap.
        return memory(tensor, 0);
    }
    let op = Locate { stream, address: Cell::new(0) };
    tensor.inplace_op1(&op)?;
    memory(tensor, op.address.get())
}

/// The memory of a tensor that will be read. `stream` is candle's.
pub(super) fn input(tensor: &Tensor, stream: &CudaStream) -> Result<Memory> {
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cuda(storage) => memory(tensor, address(storage, layout, stream)?),
        _ => Err(Error::Msg("the tensor is not on a GPU".into())),
    }
}

fn memory(tensor: &Tensor, address: u64) -> Result<Memory> {
    let dtype = match tensor.dtype() {
        DType::F32 => ncclDataType_t::ncclFloat32,
        DType::F64 => ncclDataType_t::ncclFloat64,
        DType::F16 => ncclDataType_t::ncclFloat16,
        DType::BF16 => ncclDataType_t::ncclBfloat16,
        DType::I64 => ncclDataType_t::ncclInt64,
        DType::U32 => ncclDataType_t::ncclUint32,
        DType::U8 => ncclDataType_t::ncclUint8,
        _ => return Err(unsupported()),
    };
    Ok(Memory { address, count: tensor.elem_count(), dtype, bytes_per_element: tensor.dtype().size_in_bytes() })
}

fn unsupported() -> Error {
    Error::Msg("the dtype is not supported".into())
}

/// The same code for shared and exclusive borrows. An address is good as long as the storage lives; that candle's own
/// stream and no other is given keeps candle's tracking of events, where it is on, as it is.
macro_rules! address {
    ($storage:expr, $layout:expr, $stream:expr, $part:ident) => {{
        let (start, end) =
            $layout.contiguous_offsets().ok_or_else(|| Error::Msg("the tensor is not contiguous".into()))?;
        match $storage.dtype() {
            DType::F32 => $part::<f32>($storage, start, end, $stream),
            DType::F64 => $part::<f64>($storage, start, end, $stream),
            DType::F16 => $part::<f16>($storage, start, end, $stream),
            DType::BF16 => $part::<bf16>($storage, start, end, $stream),
            DType::I64 => $part::<i64>($storage, start, end, $stream),
            DType::U32 => $part::<u32>($storage, start, end, $stream),
            DType::U8 => $part::<u8>($storage, start, end, $stream),
            _ => Err(unsupported()),
        }
    }};
}

fn address(storage: &CudaStorage, layout: &Layout, stream: &CudaStream) -> Result<u64> {
    use candle_core::backend::BackendStorage;
    fn part<T: CudaDType>(storage: &CudaStorage, start: usize, end: usize, stream: &CudaStream) -> Result<u64> {
        let view = storage.as_cuda_slice::<T>()?.try_slice(start..end).ok_or_else(beyond)?;
        let (address, _recorded) = view.device_ptr(stream);
        Ok(address)
    }
    address!(storage, layout, stream, part)
}

fn address_mut(storage: &mut CudaStorage, layout: &Layout, stream: &CudaStream) -> Result<u64> {
    use candle_core::backend::BackendStorage;
    fn part<T: CudaDType>(storage: &mut CudaStorage, start: usize, end: usize, stream: &CudaStream) -> Result<u64> {
        let mut view = storage.as_cuda_slice_mut::<T>()?.try_slice_mut(start..end).ok_or_else(beyond)?;
        let (address, _recorded) = view.device_ptr_mut(stream);
        Ok(address)
    }
    address!(storage, layout, stream, part)
}

fn beyond() -> Error {
    Error::Msg("the layout reaches beyond the storage".into())
}

/// An in-place op that only looks where the storage is.
struct Locate<'a> {
    stream: &'a CudaStream,
    address: Cell<u64>,
}

impl InplaceOp1 for Locate<'_> {
    fn name(&self) -> &'static str {
        "collective"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> Result<()> {
        Err(Error::Msg("the tensor is not on a GPU".into()))
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> Result<()> {
        self.address.set(address_mut(storage, layout, self.stream)?);
        Ok(())
    }
}
