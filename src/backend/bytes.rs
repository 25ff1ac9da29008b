//! The bytes of tensors on the CPU, for engines: borrowed in place, so that none is copied.
use super::check::byte_range;
use crate::tensor::hold;
use crate::{Error, Result};
use candle_core::{CpuStorage, Storage, StorageRef, Tensor};

/// Calls `work` with the bytes of `tensor`, which stays locked for reading meanwhile. Gradients end here: what `work` does with
/// the values is in no graph.
///
/// # Errors
/// Returns [`Error::InvalidArgument`] unless the tensor is contiguous, on the CPU, and of a dtype that engines move (f32,
/// f64, f16, bf16, i64, u32 or u8).
pub fn bytes<R>(tensor: &Tensor, work: impl FnOnce(&[u8]) -> R) -> Result<R> {
    check(tensor, "bytes")?;
    let storage = tensor.storage_and_layout().0;
    let bytes = all_bytes(&storage).and_then(|bytes| bytes.get(byte_range(tensor)));
    bytes.map(work).ok_or_else(|| unreachable_bytes(tensor, "bytes"))
}

/// Calls `work` with the bytes of `tensor` to change them. Gradients end here: no backward pass learns of the change. The storage,
/// which views of the tensor share, stays locked meanwhile. An engine that waits for other ranks should not do so in `work`: they
/// may be waiting for a call of this rank on another view.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_ddp::backend::bytes_mut;
///
/// # fn main() -> candle_ddp::Result<()> {
/// let tensor = Tensor::zeros((2, 2), DType::U8, &Device::Cpu)?;
/// bytes_mut(&tensor.narrow(0, 1, 1)?, |row| row.copy_from_slice(&[3, 4]))?;
/// assert_eq!(tensor.to_vec2::<u8>()?, [[0, 0], [3, 4]]);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// Returns the errors of [`bytes`].
pub fn bytes_mut<R>(tensor: &Tensor, work: impl FnOnce(&mut [u8]) -> R) -> Result<R> {
    check(tensor, "bytes_mut")?;
    // The lock of the storage; the borrow that gave it ends here.
    let lock = StorageRef::rwlock(&tensor.storage_and_layout().0);
    let mut storage = lock.write();
    let bytes = all_bytes_mut(&mut storage).and_then(|bytes| bytes.get_mut(byte_range(tensor)));
    bytes.map(work).ok_or_else(|| unreachable_bytes(tensor, "bytes_mut"))
}

fn check(tensor: &Tensor, operation: &str) -> Result<()> {
    hold::check(tensor)?;
    if tensor.is_contiguous() {
        return Ok(());
    }
    Err(refuse(
        tensor,
        operation,
        format!("with strides {:?} is not contiguous: pass a contiguous() copy", tensor.stride()),
    ))
}

fn unreachable_bytes(tensor: &Tensor, operation: &str) -> Error {
    let place = tensor.device().location();
    refuse(
        tensor,
        operation,
        format!("on {place:?} cannot be borrowed: it must be on the CPU, of a dtype that engines move"),
    )
}

fn refuse(tensor: &Tensor, operation: &str, reason: String) -> Error {
    let described = crate::error::describe(tensor.dtype(), tensor.shape());
    Error::invalid("tensor", format!("{operation}: {described} {reason}"))
}

/// Borrows the bytes of storages with a supported dtype; the same code serves shared and exclusive borrows.
macro_rules! all {
    ($storage:expr, $cast:path) => {
        match $storage {
            Storage::Cpu(CpuStorage::U8(values)) => Some($cast(values)),
            Storage::Cpu(CpuStorage::U32(values)) => Some($cast(values)),
            Storage::Cpu(CpuStorage::I64(values)) => Some($cast(values)),
            Storage::Cpu(CpuStorage::BF16(values)) => Some($cast(values)),
            Storage::Cpu(CpuStorage::F16(values)) => Some($cast(values)),
            Storage::Cpu(CpuStorage::F32(values)) => Some($cast(values)),
            Storage::Cpu(CpuStorage::F64(values)) => Some($cast(values)),
            _ => None,
        }
    };
}

/// All bytes of a storage, unless it is not on the CPU or its dtype is not supported.
pub(super) fn all_bytes(storage: &Storage) -> Option<&[u8]> {
    all!(storage, bytemuck::cast_slice)
}

/// All bytes of a storage, for writing.
pub(super) fn all_bytes_mut(storage: &mut Storage) -> Option<&mut [u8]> {
    all!(storage, bytemuck::cast_slice_mut)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    #[test]
    fn a_view_lends_its_own_bytes() {
        let tensor = Tensor::arange(0_i64, 6, &Device::Cpu).unwrap().reshape((3, 2)).unwrap();
        let row = tensor.narrow(0, 1, 1).unwrap();
        bytes_mut(&row, |bytes| bytemuck::cast_slice_mut::<u8, i64>(bytes)[0] = 20).unwrap();
        bytes(&row, |bytes| assert_eq!(bytemuck::cast_slice::<u8, i64>(bytes), [20, 3])).unwrap();
        assert_eq!(tensor.to_vec2::<i64>().unwrap(), [[0, 1], [20, 3], [4, 5]]);
        // Further reading borrows at the same time.
        bytes(&row, |_| bytes(&tensor, |bytes| assert_eq!(bytes.len(), 48)).unwrap()).unwrap();
        let empty = Tensor::zeros((0, 3), DType::F32, &Device::Cpu).unwrap();
        assert_eq!(bytes_mut(&empty, |bytes| bytes.len()).unwrap(), 0);
    }

    #[test]
    fn what_cannot_be_borrowed_is_refused() {
        let tensor = Tensor::zeros((2, 3), DType::F32, &Device::Cpu).unwrap();
        let transposed = tensor.t().unwrap();
        for error in [bytes(&transposed, |_| ()).unwrap_err(), bytes_mut(&transposed, |_| ()).unwrap_err()] {
            assert!(error.to_string().contains("not contiguous: pass a contiguous() copy"), "{error}");
        }
        let odd = Tensor::zeros(3, DType::I32, &Device::Cpu).unwrap();
        assert!(bytes(&odd, |_| ()).unwrap_err().to_string().contains("a dtype that engines move"));
    }
}
