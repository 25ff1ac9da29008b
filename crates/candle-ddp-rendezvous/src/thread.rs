//! Threads, whose errors say which limit to raise.
use crate::{Error, Result};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{Builder, JoinHandle};

thread_local! {
    /// Whether this library has started the thread.
    static IS_HELPER: Cell<bool> = const { Cell::new(false) };
}

/// The number of threads that run.
static HELPERS: AtomicUsize = AtomicUsize::new(0);

/// Whether [`spawn`] has started the calling thread. It then runs nothing of the program's.
pub fn is_helper() -> bool {
    IS_HELPER.get()
}

/// How many threads that [`spawn`] has started run.
pub fn helpers() -> usize {
    HELPERS.load(Ordering::Relaxed)
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
        /// Counts the thread until it ends, even by a panic.
        struct Counted;
        impl Drop for Counted {
            fn drop(&mut self) {
                HELPERS.fetch_sub(1, Ordering::Relaxed);
            }
        }
        let _counted = Counted;
        IS_HELPER.set(true);
        body()
    };
    HELPERS.fetch_add(1, Ordering::Relaxed);
    Builder::new().name(name.clone()).spawn(body).map_err(|error| {
        HELPERS.fetch_sub(1, Ordering::Relaxed);
        not_started(&name, error)
    })
}

/// The error of a thread that the system has not started.
pub fn not_started(name: &str, error: std::io::Error) -> Error {
    Error::io(format!("starting the thread {name} ({HINT})"), error)
}

/// What to do if the system starts no more threads.
pub const HINT: &str =
    "raise the limit on processes, `ulimit -u` or that of the container or job, or the one on memory, `ulimit -v`";
