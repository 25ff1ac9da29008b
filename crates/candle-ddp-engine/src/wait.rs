//! Waits for a change of a value that threads share.
use crate::panic::{lock, wait_timeout};
use std::sync::{Condvar, Mutex};
use std::time::Instant;

/// Waits until `found` returns something of `value`, of whose changes `changed` tells, at most until `deadline`.
pub(crate) fn wait_until<S, T>(
    value: &Mutex<S>,
    changed: &Condvar,
    deadline: Instant,
    mut found: impl FnMut(&mut S) -> Option<T>,
) -> Option<T> {
    let mut value = lock(value);
    loop {
        if let Some(result) = found(&mut value) {
            return Some(result);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return None;
        }
        value = wait_timeout(changed, value, left);
    }
}
