//! The threads of a program that make calls.
use candle_ddp_rendezvous::thread::{helpers, is_helper};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// A thread.
#[derive(Debug)]
pub(crate) struct Thread {
    /// Its number, which no other thread of the process has had.
    pub(crate) id: u64,
    /// Whether this library has started it, for calls in groups that the program does not know.
    pub(crate) is_helper: bool,
    is_over: AtomicBool,
}

/// Notes the end of the thread.
struct This(Arc<Thread>);

/// How many threads of the program are known.
static KNOWN: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static THIS: This = {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let (id, is_helper, is_over) = (NEXT.fetch_add(1, Ordering::Relaxed), is_helper(), AtomicBool::new(false));
        KNOWN.fetch_add(usize::from(!is_helper), Ordering::Relaxed);
        This(Arc::new(Thread { id, is_helper, is_over }))
    };
}

impl Drop for This {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::Relaxed);
        KNOWN.fetch_sub(usize::from(!self.0.is_helper), Ordering::Relaxed);
    }
}

/// How many threads of this process are neither of this library nor have made calls, if the system says so.
pub(crate) fn strangers() -> Option<usize> {
    let all = std::fs::read_dir("/proc/self/task").ok()?.count();
    Some(all.saturating_sub(helpers() + KNOWN.load(Ordering::Relaxed)))
}

/// Whether a thread may make calls in a group that has not made any yet, and the helpers that make calls there, of which `callers` have
/// done so. When it was made, so many threads were `strangers`.
pub(crate) fn may_call(callers: &[Arc<Thread>], strangers: Option<usize>) -> (bool, Vec<u64>) {
    let living = || callers.iter().filter(|thread| !thread.is_over());
    let are_more = || self::strangers().zip(strangers).is_none_or(|(now, then)| now > then);
    let mut helpers: Vec<u64> = living().filter(|thread| thread.is_helper).map(|thread| thread.id).collect();
    helpers.sort_unstable();
    (living().next().is_none() && are_more(), helpers)
}

impl Thread {
    pub(crate) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    /// Adds the calling thread to `threads`, unless it is there.
    #[inline]
    pub(crate) fn enter(threads: &mut Vec<Arc<Self>>) {
        // A thread that is ending has no number; it counts as one of those that are known.
        let _ = THIS.try_with(|this| {
            if threads.iter().all(|thread| thread.id != this.0.id) {
                threads.retain(|thread| !thread.is_over());
                threads.push(Arc::clone(&this.0));
            }
        });
    }
}

/// The number of the calling thread; 0 while it ends.
#[inline]
pub(crate) fn current() -> u64 {
    THIS.try_with(|this| this.0.id).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_that_are_over_are_forgotten() {
        let mut threads = Vec::new();
        let enter = |mut threads: Vec<Arc<Thread>>| {
            std::thread::spawn(move || {
                Thread::enter(&mut threads);
                Thread::enter(&mut threads);
                threads
            })
            .join()
            .unwrap()
        };
        threads = enter(enter(threads));
        assert_eq!((threads.len(), threads[0].is_over()), (1, true));
        Thread::enter(&mut threads);
        assert_eq!((threads.len(), threads[0].id, threads[0].is_over()), (1, current(), false));
    }
}
