//! Threads, whose errors say which limit to raise.
use crate::panic::lock;
use crate::{Error, Result};
use rustix::thread::{Pid, gettid};
use std::cell::Cell;
use std::sync::Mutex;
use std::thread::{Builder, JoinHandle};

thread_local! {
    /// Whether this library has started the thread.
    static IS_HELPER: Cell<bool> = const { Cell::new(false) };
}

/// The threads that run.
static HELPERS: Mutex<Vec<Pid>> = Mutex::new(Vec::new());

/// Whether [`spawn`] has started the calling thread. It then runs nothing of the program's.
pub fn is_helper() -> bool {
    IS_HELPER.get()
}

/// The threads that [`spawn`] has started, and that run, as the system numbers them.
pub fn helpers() -> Vec<Pid> {
    lock(&HELPERS).clone()
}

/// Starts a thread, for work of this library.
///
/// # Errors
/// Returns [`Error::Io`] if the system starts no more threads.
pub fn spawn<T: Send + 'static>(
    name: impl Into<String>,
    body: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>> {
    let name = name.into();
    let body = || {
        /// Lists the thread until it ends, even by a panic.
        struct Listed(Pid);
        impl Drop for Listed {
            fn drop(&mut self) {
                lock(&HELPERS).retain(|helper| *helper != self.0);
            }
        }
        let listed = Listed(gettid());
        lock(&HELPERS).push(listed.0);
        IS_HELPER.set(true);
        body()
    };
    Builder::new().name(name.clone()).spawn(body).map_err(|error| not_started(&name, error))
}

/// The error of a thread that the system has not started.
pub fn not_started(name: &str, error: std::io::Error) -> Error {
    Error::io(format!("starting the thread {name} ({HINT})"), error)
}

/// What to do if the system starts no more threads.
pub const HINT: &str =
    "raise the limit on processes, `ulimit -u` or that of the container or job, or the one on memory, `ulimit -v`";
