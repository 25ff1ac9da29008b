//! Loom's atomics, and a futex made of its mutex and condition variable.
pub(super) use loom::sync::atomic::{AtomicBool, Ordering, fence};
use loom::sync::{Condvar, Mutex};
use std::time::Duration;

/// A word, and the queue that the kernel keeps for it.
pub(super) struct AtomicU32 {
    value: loom::sync::atomic::AtomicU32,
    /// The number of threads that sleep on the word, and of those that have been woken and still sleep.
    queue: Mutex<(usize, usize)>,
    woken: Condvar,
}

impl AtomicU32 {
    pub(super) fn new(value: u32) -> Self {
        Self { value: loom::sync::atomic::AtomicU32::new(value), queue: Mutex::default(), woken: Condvar::new() }
    }

    pub(super) fn load(&self, ordering: Ordering) -> u32 {
        self.value.load(ordering)
    }

    pub(super) fn store(&self, value: u32, ordering: Ordering) {
        self.value.store(value, ordering);
    }

    pub(super) fn fetch_add(&self, value: u32, ordering: Ordering) -> u32 {
        self.value.fetch_add(value, ordering)
    }
}

/// Wakes one thread that sleeps on `word`.
pub(super) fn futex_wake(word: &AtomicU32) {
    let mut queue = word.queue.lock().unwrap();
    if queue.0 > queue.1 {
        queue.1 += 1;
        word.woken.notify_one();
    }
}

/// Sleeps while `word` is `value`, for as long as it takes. The kernel compares under the lock of the word's queue, and so
/// does this.
pub(super) fn futex_wait(word: &AtomicU32, value: u32, _: Duration) -> Result<(), String> {
    let mut queue = word.queue.lock().unwrap();
    if word.value.load(Ordering::Relaxed) != value {
        return Ok(());
    }
    queue.0 += 1;
    while queue.1 == 0 {
        queue = word.woken.wait(queue).unwrap();
    }
    queue.0 -= 1;
    queue.1 -= 1;
    Ok(())
}
