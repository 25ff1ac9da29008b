//! Threads, whose errors say which limit to raise.
use crate::{Error, Result};
use std::thread::{Builder, JoinHandle};

/// Starts a thread.
///
/// # Errors
/// Returns [`Error::Io`] if the system starts no more threads.
pub fn spawn<T: Send + 'static>(
    name: impl Into<String>,
    body: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>> {
    let name = name.into();
    Builder::new().name(name.clone()).spawn(body).map_err(|error| not_started(&name, error))
}

/// The error of a thread that the system has not started.
pub fn not_started(name: &str, error: std::io::Error) -> Error {
    Error::io(format!("starting the thread {name} ({HINT})"), error)
}

/// What to do if the system starts no more threads.
pub const HINT: &str =
    "raise the limit on processes, `ulimit -u` or that of the container or job, or the one on memory, `ulimit -v`";
