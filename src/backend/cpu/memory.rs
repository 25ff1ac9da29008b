//! The memory of candle tensors, for the engine.
use crate::backend::Collective;
use crate::backend::bytes::{all_bytes, all_bytes_mut};
use crate::backend::check::byte_range;
use crate::backend::collective::Arguments;
use candle_core::{Storage, StorageRef, Tensor};
use candle_ddp_engine::{Memory, Operands, Slice};
use parking_lot::RwLock;
use std::time::Duration;

/// The storage of a tensor, behind the lock that all its views share.
struct Locked<'a>(&'a RwLock<Storage>);

impl<'a> Locked<'a> {
    fn of(tensor: &'a Tensor) -> Self {
        Self(StorageRef::rwlock(&tensor.storage_and_layout().0))
    }
}

impl Memory for Locked<'_> {
    fn address(&self) -> usize {
        std::ptr::from_ref(self.0).addr()
    }

    // candle itself locks only for reading, and without a time limit. The thread may already hold the lock for reading; a
    // waiting writer must not come in between.
    fn read(&self, patience: Option<Duration>, work: &mut dyn FnMut(&[u8])) -> bool {
        let guard = match patience {
            None => self.0.try_read_recursive(),
            Some(patience) => self.0.try_read_recursive_for(patience),
        };
        guard.map(|storage| work(all_bytes(&storage).unwrap_or_default())).is_some()
    }

    fn write(&self, patience: Option<Duration>, work: &mut dyn FnMut(&mut [u8])) -> bool {
        let guard = match patience {
            None => self.0.try_write(),
            Some(patience) => self.0.try_write_for(patience),
        };
        guard.map(|mut storage| work(all_bytes_mut(&mut storage).unwrap_or_default())).is_some()
    }
}

/// The bytes of `tensor` in its memory.
fn slice<'a>(memory: Option<&'a Locked<'_>>, tensor: Option<&Tensor>) -> Option<Slice<'a>> {
    Some(Slice::new(memory?, byte_range(tensor?)))
}

/// Calls `work` with the bytes of the tensors of `collective`, which has been [checked](super::check): they are contiguous,
/// on the CPU, and of supported dtypes.
pub(super) fn with_operands<R>(collective: &Collective, work: impl FnOnce(Operands) -> R) -> R {
    let Arguments { output, input, .. } = collective.arguments();
    let [output_memory, input_memory] = [output, input].map(|tensor| tensor.map(Locked::of));
    work(Operands { output: slice(output_memory.as_ref(), output), input: slice(input_memory.as_ref(), input) })
}
