//! The processor's and the system's primitives that the protocol uses: atomics, a fence and a futex. `model`
//! replaces this file to explore all orders in which threads may run and see each other's writes.
pub(super) use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use std::time::Duration;

/// Wakes the thread that sleeps on `word`, in any process.
pub(super) fn futex_wake(word: &AtomicU32) {
    // Nothing could be done about an error, and sleepers check periodically.
    let _ = rustix::thread::futex::wake(word, rustix::thread::futex::Flags::empty(), 1);
}

/// Sleeps while `word` is `value`, for at most `longest`, which is less than a second.
pub(super) fn futex_wait(word: &AtomicU32, value: u32, longest: Duration) -> Result<(), String> {
    use rustix::io::Errno;
    use rustix::thread::futex;
    let timeout = futex::Timespec { tv_sec: 0, tv_nsec: i64::from(longest.subsec_nanos()) };
    match futex::wait(word, futex::Flags::empty(), value, Some(&timeout)) {
        Ok(()) | Err(Errno::AGAIN | Errno::INTR | Errno::TIMEDOUT) => Ok(()),
        Err(error) => Err(format!("futex: {error}")),
    }
}
