//! The threads of a program that make calls.
use crate::panic::lock;
use candle_ddp_base::thread::{helpers, is_helper};
use rustix::thread::{Pid, gettid};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// A thread.
#[derive(Debug)]
pub(crate) struct Thread {
    /// Its number, which no other thread of the process has had.
    pub(crate) id: u64,
    /// Whether this library has started it, for calls in groups that the program does not know.
    pub(crate) is_helper: bool,
    is_over: AtomicBool,
}

/// Notes the end of the thread, which has this number in the system.
struct This(Arc<Thread>, Pid);

/// The threads of the program that are known, as the system numbers them.
static KNOWN: Mutex<Vec<Pid>> = Mutex::new(Vec::new());

thread_local! {
    static THIS: This = {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let (id, is_helper, is_over) = (NEXT.fetch_add(1, Ordering::Relaxed), is_helper(), AtomicBool::new(false));
        let number = gettid();
        lock(&KNOWN).push(number);
        This(Arc::new(Thread { id, is_helper, is_over }), number)
    };
}

impl Drop for This {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::Relaxed);
        lock(&KNOWN).retain(|known| *known != self.1);
    }
}

/// The threads of this process that neither are of this library nor have made calls, if the system names them.
pub(crate) fn strangers() -> Option<Vec<Pid>> {
    let number = |name: &str| Pid::from_raw(name.parse().ok()?);
    let all = std::fs::read_dir("/proc/self/task").ok()?;
    let all: Option<Vec<Pid>> = all.map(|thread| number(thread.ok()?.file_name().to_str()?)).collect();
    let (helpers, known) = (helpers(), lock(&KNOWN));
    Some(all?.into_iter().filter(|thread| !helpers.contains(thread) && !known.contains(thread)).collect())
}

/// Whether a thread may make calls in a group that has not made any yet, and the helpers that make calls there, of which `callers` have
/// done so. When it was made, these threads were `strangers`.
pub(crate) fn may_call(callers: &[Arc<Thread>], strangers: Option<&[Pid]>) -> (bool, Vec<u64>) {
    let living = || callers.iter().filter(|thread| !thread.is_over());
    let is_new = |now: &[Pid], then: &[Pid]| now.iter().any(|thread| !then.contains(thread));
    let are_new = || self::strangers().zip(strangers).is_none_or(|(now, then)| is_new(&now, then));
    let mut helpers: Vec<u64> = living().filter(|thread| thread.is_helper).map(|thread| thread.id).collect();
    helpers.sort_unstable();
    (living().next().is_none() && are_new(), helpers)
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
