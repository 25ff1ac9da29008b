//! The collectives as methods of a communicator.
use super::comm::Comm;
use super::ffi;
use super::status::{CallResult, NcclFailure, int, status};
use cudarc::nccl::sys;
use std::ffi::c_void;

/// A part of a tensor in the GPU's memory, in the form that NCCL's calls take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Buffer {
    /// The address of its first element on the device.
    pub(super) address: u64,
    /// The number of elements.
    pub(super) count: usize,
    pub(super) dtype: sys::ncclDataType_t,
    pub(super) bytes_per_element: usize,
}

impl Buffer {
    /// Part `index` of `parts` equal parts.
    pub(super) fn part(&self, index: usize, parts: usize) -> Self {
        let count = self.count / parts;
        Self { address: self.address + (index * count * self.bytes_per_element) as u64, count, ..*self }
    }

    fn pointer(&self) -> *mut c_void {
        // This is an address on the device, never dereferenced on the host.
        self.address as *mut c_void
    }
}

/// The stream on which a call runs.
#[derive(Clone, Copy)]
pub(super) struct Target(pub(super) sys::cudaStream_t);

/// The collectives. Their memory must be on the communicator's device, have the sizes that NCCL expects, and stay
/// allocated until the stream has passed them.
impl Comm {
    /// Starts several messages at once, so that none waits for another.
    pub(super) fn together(
        &mut self,
        calls: impl FnOnce(&mut Self) -> std::result::Result<(), NcclFailure>,
    ) -> CallResult {
        // SAFETY: a group of calls needs nothing.
        status("ncclGroupStart", unsafe { ffi::ncclGroupStart() })?;
        let called = calls(self);
        // Runs even after an error, since the group of calls belongs to the thread and must not stay open.
        // SAFETY: it was begun above.
        let ended = status("ncclGroupEnd", unsafe { ffi::ncclGroupEnd() });
        called.and(ended)
    }

    /// `memory` is both input and output.
    ///
    /// # Safety
    /// The memory lies on the communicator's device, has the sizes that NCCL expects, and stays allocated until the stream
    /// has passed the call.
    pub(super) unsafe fn all_reduce(&mut self, memory: Buffer, op: sys::ncclRedOp_t, target: Target) -> CallResult {
        let Buffer { count, dtype, .. } = memory;
        // SAFETY: the caller's promise; the communicator is valid.
        status("ncclAllReduce", unsafe {
            ffi::ncclAllReduce(memory.pointer(), memory.pointer(), count, dtype, op, self.0, target.0)
        })
    }

    /// `memory` is both input and output.
    ///
    /// # Safety
    /// The memory lies on the communicator's device, has the sizes that NCCL expects, and stays allocated until the stream
    /// has passed the call.
    pub(super) unsafe fn broadcast(&mut self, memory: Buffer, root: usize, target: Target) -> CallResult {
        let Buffer { count, dtype, .. } = memory;
        let root = int("ncclBroadcast", root)?;
        // SAFETY: the caller's promise; the communicator is valid.
        status("ncclBroadcast", unsafe {
            ffi::ncclBroadcast(memory.pointer(), memory.pointer(), count, dtype, root, self.0, target.0)
        })
    }

    /// `memory` is the input and, on the root, also the output.
    ///
    /// # Safety
    /// The memory lies on the communicator's device, has the sizes that NCCL expects, and stays allocated until the stream
    /// has passed the call.
    pub(super) unsafe fn reduce(
        &mut self,
        memory: Buffer,
        op: sys::ncclRedOp_t,
        root: usize,
        is_root: bool,
        target: Target,
    ) -> CallResult {
        let Buffer { count, dtype, .. } = memory;
        let output = if is_root { memory.pointer() } else { std::ptr::null_mut() };
        let root = int("ncclReduce", root)?;
        // SAFETY: the caller's promise; the communicator is valid; the output is used on the root alone.
        status("ncclReduce", unsafe {
            ffi::ncclReduce(memory.pointer(), output, count, dtype, op, root, self.0, target.0)
        })
    }

    /// # Safety
    /// The memory lies on the communicator's device, has the sizes that NCCL expects, and stays allocated until the stream
    /// has passed the call.
    pub(super) unsafe fn all_gather(&mut self, output: Buffer, input: Buffer, target: Target) -> CallResult {
        let Buffer { count, dtype, .. } = input;
        // SAFETY: the caller's promise; the communicator is valid.
        status("ncclAllGather", unsafe {
            ffi::ncclAllGather(input.pointer(), output.pointer(), count, dtype, self.0, target.0)
        })
    }

    /// # Safety
    /// The memory lies on the communicator's device, has the sizes that NCCL expects, and stays allocated until the stream
    /// has passed the call.
    pub(super) unsafe fn reduce_scatter(
        &mut self,
        output: Buffer,
        input: Buffer,
        op: sys::ncclRedOp_t,
        target: Target,
    ) -> CallResult {
        let Buffer { count, dtype, .. } = output;
        // SAFETY: the caller's promise; the communicator is valid.
        status("ncclReduceScatter", unsafe {
            ffi::ncclReduceScatter(input.pointer(), output.pointer(), count, dtype, op, self.0, target.0)
        })
    }

    /// # Safety
    /// The memory lies on the communicator's device, has the sizes that NCCL expects, and stays allocated until the stream
    /// has passed the call.
    pub(super) unsafe fn send(&mut self, memory: Buffer, peer: usize, target: Target) -> CallResult {
        let Buffer { count, dtype, .. } = memory;
        let peer = int("ncclSend", peer)?;
        // SAFETY: the caller's promise; the communicator is valid.
        status("ncclSend", unsafe { ffi::ncclSend(memory.pointer(), count, dtype, peer, self.0, target.0) })
    }

    /// # Safety
    /// The memory lies on the communicator's device, has the sizes that NCCL expects, and stays allocated until the stream
    /// has passed the call.
    pub(super) unsafe fn recv(&mut self, memory: Buffer, peer: usize, target: Target) -> CallResult {
        let Buffer { count, dtype, .. } = memory;
        let peer = int("ncclRecv", peer)?;
        // SAFETY: the caller's promise; the communicator is valid.
        status("ncclRecv", unsafe { ffi::ncclRecv(memory.pointer(), count, dtype, peer, self.0, target.0) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_memory_lie_side_by_side() {
        let whole = Buffer { address: 1000, count: 12, dtype: sys::ncclDataType_t::ncclBfloat16, bytes_per_element: 2 };
        assert_eq!(whole.part(0, 3), Buffer { count: 4, ..whole });
        assert_eq!(whole.part(2, 3), Buffer { address: 1016, count: 4, ..whole });
    }
}
