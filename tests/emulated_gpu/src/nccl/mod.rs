//! NCCL: ranks exchange the contents of their buffers through a hub. README.md in this folder describes how, and the
//! differences from NCCL.
mod calls;
mod communicator;
mod connection;
mod exchange;
mod ffi;
mod group;
mod handles;
mod hub;
mod job;
mod log;
mod peer_info;
mod reduce;
#[cfg(test)]
mod tests;
mod wire;

use std::ffi::{CString, c_char, c_int};
use std::io::Write;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// `ncclResult_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
enum Code {
    Success = 0,
    UnhandledCudaError = 1,
    SystemError = 2,
    InternalError = 3,
    InvalidArgument = 4,
    InvalidUsage = 5,
    RemoteError = 6,
    InProgress = 7,
}

impl Code {
    /// Decodes the errors that processes exchange.
    fn from_number(number: c_int) -> Self {
        let errors = [Self::SystemError, Self::InvalidArgument, Self::InvalidUsage, Self::RemoteError];
        errors.into_iter().find(|code| *code as c_int == number).unwrap_or(Self::InternalError)
    }
}

/// An error with its text.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Failure {
    code: Code,
    text: String,
}

type Outcome<T> = Result<T, Failure>;

fn failure(code: Code, text: impl Into<String>) -> Failure {
    Failure { code, text: text.into() }
}

fn system_error(doing: &str, error: &std::io::Error) -> Failure {
    failure(Code::SystemError, format!("{doing}: {error}"))
}

/// The result of `ncclGetLastError`: null, or a text that is never freed, because its reader's lifetime is unknown.
static LAST_ERROR: AtomicPtr<c_char> = AtomicPtr::new(std::ptr::null_mut());

fn set_last_error(text: &str) {
    #[cfg(test)]
    tests::LAST_ERROR_HERE.set(text.to_owned());
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    LAST_ERROR.store(text.into_raw(), Ordering::Release);
}

fn last_error() -> *const c_char {
    let text = LAST_ERROR.load(Ordering::Acquire);
    if text.is_null() { c"".as_ptr() } else { text }
}

/// Ends the process because of a use of NCCL whose outcome is undefined.
fn die(text: &str) -> ! {
    let _ = writeln!(std::io::stderr().lock(), "emulated NCCL: {text}");
    std::process::abort()
}

/// No code leaves a value half-changed, so the content of a poisoned lock is valid.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
