//! NCCL's functions, as far as this engine calls them. cudarc's declarations return an enum, for which a number that it does not have, such
//! as one of a newer NCCL, is undefined behaviour.
use cudarc::nccl::sys::{cudaStream_t, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t, ncclUniqueId};
use std::ffi::{c_char, c_int, c_void};
use std::fmt;

/// NCCL's `ncclResult_t`: newer versions have further numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(super) struct Code(pub(super) u32);

impl Code {
    pub(super) const SUCCESS: Self = Self(0);
    pub(super) const UNHANDLED_CUDA_ERROR: Self = Self(1);
    pub(super) const SYSTEM_ERROR: Self = Self(2);
    pub(super) const REMOTE_ERROR: Self = Self(6);
    pub(super) const IN_PROGRESS: Self = Self(7);
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NAMES: [&str; 8] = [
            "ncclSuccess",
            "ncclUnhandledCudaError",
            "ncclSystemError",
            "ncclInternalError",
            "ncclInvalidArgument",
            "ncclInvalidUsage",
            "ncclRemoteError",
            "ncclInProgress",
        ];
        match NAMES.get(self.0 as usize) {
            Some(name) => f.write_str(name),
            None => write!(f, "ncclResult_t {}", self.0),
        }
    }
}

// The signatures are those of nccl.h, where `ncclResult_t` is an enum: 32 bits.
unsafe extern "C" {
    pub(super) fn ncclGetVersion(version: *mut c_int) -> Code;
    pub(super) fn ncclGetUniqueId(id: *mut ncclUniqueId) -> Code;
    pub(super) fn ncclGetErrorString(result: Code) -> *const c_char;
    pub(super) fn ncclGetLastError(comm: ncclComm_t) -> *const c_char;
    pub(super) fn ncclCommInitRankConfig(
        comm: *mut ncclComm_t,
        ranks: c_int,
        id: ncclUniqueId,
        rank: c_int,
        config: *mut ncclConfig_t,
    ) -> Code;
    pub(super) fn ncclCommSplit(
        comm: ncclComm_t,
        color: c_int,
        key: c_int,
        new: *mut ncclComm_t,
        config: *mut ncclConfig_t,
    ) -> Code;
    pub(super) fn ncclCommGetAsyncError(comm: ncclComm_t, error: *mut Code) -> Code;
    pub(super) fn ncclCommFinalize(comm: ncclComm_t) -> Code;
    pub(super) fn ncclCommDestroy(comm: ncclComm_t) -> Code;
    pub(super) fn ncclCommAbort(comm: ncclComm_t) -> Code;
    pub(super) fn ncclGroupStart() -> Code;
    pub(super) fn ncclGroupEnd() -> Code;
    pub(super) fn ncclAllReduce(
        input: *const c_void,
        output: *mut c_void,
        count: usize,
        dtype: ncclDataType_t,
        op: ncclRedOp_t,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> Code;
    pub(super) fn ncclBroadcast(
        input: *const c_void,
        output: *mut c_void,
        count: usize,
        dtype: ncclDataType_t,
        root: c_int,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> Code;
    pub(super) fn ncclReduce(
        input: *const c_void,
        output: *mut c_void,
        count: usize,
        dtype: ncclDataType_t,
        op: ncclRedOp_t,
        root: c_int,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> Code;
    pub(super) fn ncclAllGather(
        input: *const c_void,
        output: *mut c_void,
        count: usize,
        dtype: ncclDataType_t,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> Code;
    pub(super) fn ncclReduceScatter(
        input: *const c_void,
        output: *mut c_void,
        count: usize,
        dtype: ncclDataType_t,
        op: ncclRedOp_t,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> Code;
    pub(super) fn ncclSend(
        input: *const c_void,
        count: usize,
        dtype: ncclDataType_t,
        peer: c_int,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> Code;
    pub(super) fn ncclRecv(
        output: *mut c_void,
        count: usize,
        dtype: ncclDataType_t,
        peer: c_int,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> Code;
}
