//! Panics of other threads: their messages, and the mutexes that they held.
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex` even after a panic of a thread that held it. For values that are never left half-changed.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The message of a caught panic, for an error.
pub fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| text.to_string());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_string());
    format!("it panicked: {text}")
}
