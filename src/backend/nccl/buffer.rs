//! The memory of candle's tensors in the form that NCCL's calls take.
//!
//! The tensors have been [checked](crate::backend::check): contiguous, on the group's device, of a supported dtype.
use super::calls::Buffer;
use crate::kernels::address;
use candle_core::{DType, Result, Tensor, bail};
use cudarc::nccl::sys::ncclDataType_t;

/// The memory of a tensor that will be written.
pub(super) fn output(tensor: &Tensor) -> Result<Buffer> {
    memory(tensor, address::output(tensor)?)
}

/// The memory of a tensor that will be read.
pub(super) fn input(tensor: &Tensor) -> Result<Buffer> {
    memory(tensor, address::input(tensor)?)
}

fn memory(tensor: &Tensor, address: u64) -> Result<Buffer> {
    let dtype = match tensor.dtype() {
        DType::F32 => ncclDataType_t::ncclFloat32,
        DType::F64 => ncclDataType_t::ncclFloat64,
        DType::F16 => ncclDataType_t::ncclFloat16,
        DType::BF16 => ncclDataType_t::ncclBfloat16,
        DType::I64 => ncclDataType_t::ncclInt64,
        DType::U32 => ncclDataType_t::ncclUint32,
        DType::U8 => ncclDataType_t::ncclUint8,
        dtype => bail!("NCCL has no dtype for {dtype:?}"),
    };
    Ok(Buffer { address, count: tensor.elem_count(), dtype, bytes_per_element: tensor.dtype().size_in_bytes() })
}
