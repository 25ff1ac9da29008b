//! Panics of other threads: their messages, and the mutexes that they held.
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Locks `mutex` even after a panic of a thread that held it. For values that are never left half-changed.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for `changed` with the guard of a [`lock`].
pub fn wait<'a, T>(changed: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    changed.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// Like [`wait`], but at most for `timeout`.
pub fn wait_timeout<'a, T>(changed: &Condvar, guard: MutexGuard<'a, T>, timeout: Duration) -> MutexGuard<'a, T> {
    changed.wait_timeout(guard, timeout).unwrap_or_else(PoisonError::into_inner).0
}

/// The message of a caught panic, for an error.
pub fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| text.to_string());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_string());
    format!("it panicked: {text}")
}
