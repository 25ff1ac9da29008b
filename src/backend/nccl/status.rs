//! NCCL's results: its version, the text of its errors, and whether a call is complete.
use super::ffi::{self, Code};
use crate::{Error, Result};
use std::ffi::{CStr, c_int};
use std::fmt;

/// Returns the version of the NCCL library in use in NCCL's numbering: 22809 is 2.28.9.
///
/// # Errors
/// Returns [`Error::Unavailable`] if the library does not report its version, and in a build without the feature `nccl`.
pub fn version() -> Result<i32> {
    let mut version = 0;
    // SAFETY: there is room for the number.
    let asked = status("ncclGetVersion", unsafe { ffi::ncclGetVersion(&raw mut version) });
    asked.map(|_| version).map_err(|failure| Error::Unavailable {
        what: "NCCL".to_string(),
        hint: format!("{failure}: the library does not report its version"),
    })
}

/// A version of NCCL, displayed in the usual form.
pub(super) struct Version(pub(super) i32);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(version) = *self;
        // Up to NCCL 2.8, minor versions had one digit.
        let (major, rest, base) = if version < 10_000 {
            (version / 1000, version % 1000, 100)
        } else {
            (version / 10_000, version % 10_000, 100)
        };
        write!(f, "{major}.{}.{}", rest / base, rest % base)
    }
}

/// An error of NCCL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NcclFailure {
    operation: &'static str,
    reason: String,
    /// Whether another rank, or the network, is to blame.
    pub(super) is_remote: bool,
}

impl NcclFailure {
    fn new(operation: &'static str, code: Code) -> Self {
        let text = |pointer: *const std::ffi::c_char| {
            if pointer.is_null() {
                return String::new();
            }
            // SAFETY: both functions below return text that ends with a zero and stays where it is while the library
            // is loaded.
            unsafe { CStr::from_ptr(pointer) }.to_string_lossy().trim().to_string()
        };
        // SAFETY: any code may be asked for.
        let name = text(unsafe { ffi::ncclGetErrorString(code) });
        // SAFETY: the communicator may be null, it is not used.
        let last = text(unsafe { ffi::ncclGetLastError(std::ptr::null_mut()) });
        let last = if last.is_empty() { last } else { format!(" (NCCL's last message: {last})") };
        let is_remote = code == Code::REMOTE_ERROR;
        let hint = hint(code, &last);
        Self { operation, reason: format!("{code}, {name}{last}{hint}"), is_remote }
    }

    /// An error that NCCL does not report itself.
    pub(super) fn other(operation: &'static str, reason: &str) -> Self {
        Self { operation, reason: reason.to_string(), is_remote: false }
    }

    /// An error whose reason another rank knows.
    pub(super) fn of_another_rank(operation: &'static str, reason: &str) -> Self {
        Self { is_remote: true, ..Self::other(operation, reason) }
    }

    pub(super) fn into_error(self, rank: usize) -> Error {
        Error::Nccl { rank, operation: self.operation.to_string(), reason: self.reason }
    }
}

impl fmt::Display for NcclFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.operation, self.reason)
    }
}

/// Advice after an error of the system or of CUDA.
fn hint(code: Code, last: &str) -> &'static str {
    if ![Code::SYSTEM_ERROR, Code::UNHANDLED_CUDA_ERROR].contains(&code) {
        return "";
    }
    if last.contains("out of memory") {
        return ". NCCL found no memory, which it takes from what tensors leave: make smaller batches, set CANDLE_DDP_NCCL_RESERVE to more \
                than its 268435456 bytes, or set CANDLE_DDP_KEEP_GPU_MEMORY=0";
    }
    ". NCCL_DEBUG=INFO shows more. If it happens at the first large call, in a container or a virtual machine, try NCCL_NVLS_ENABLE=0, \
     and among hosts with NVLink between them NCCL_MNNVL_ENABLE=0"
}

/// Whether a call is complete. Only then does a communicator accept the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    Done,
    InProgress,
}

pub(super) type CallResult = std::result::Result<Status, NcclFailure>;

/// The status of a call, or its error.
pub(super) fn status(operation: &'static str, code: Code) -> CallResult {
    match code {
        Code::SUCCESS => Ok(Status::Done),
        Code::IN_PROGRESS => Ok(Status::InProgress),
        code => Err(NcclFailure::new(operation, code)),
    }
}

/// Converts a rank or a number of ranks to NCCL's type.
pub(super) fn int(operation: &'static str, value: usize) -> std::result::Result<c_int, NcclFailure> {
    c_int::try_from(value).map_err(|_| NcclFailure::other(operation, "more ranks than NCCL can count"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nccl_tells_its_version() {
        let version = version().unwrap();
        assert!(version >= crate::backend::nccl::comm::OLDEST_VERSION, "{version}");
    }

    #[test]
    fn errors_of_the_system_and_of_cuda_come_with_a_remedy() {
        let memory = hint(Code::UNHANDLED_CUDA_ERROR, "Cuda failure 2 'out of memory'");
        assert!(memory.contains("KEEP_GPU_MEMORY") && memory.contains("CANDLE_DDP_NCCL_RESERVE"), "{memory}");
        assert!(hint(Code::SYSTEM_ERROR, "").contains("NCCL_NVLS_ENABLE=0"));
        assert_eq!(hint(Code(5), "out of memory"), "");
    }

    #[test]
    fn versions_are_written_as_usual() {
        let texts = [22809, 21800, 2708, 23000].map(|version| Version(version).to_string());
        assert_eq!(texts, ["2.28.9", "2.18.0", "2.7.8", "2.30.0"]);
    }

    #[test]
    fn errors_come_in_words() {
        let text = |number| status("ncclSend", Code(number)).unwrap_err().to_string();
        assert!(text(5).starts_with("ncclSend: ncclInvalidUsage, invalid usage"), "{}", text(5));
        // A newer NCCL may have further ones.
        assert!(text(77).starts_with("ncclSend: ncclResult_t 77, "), "{}", text(77));
    }
}
