//! Parallel loops that compile quickly. rayon compiles its jobs and latches again for each closure of `for_each`, which was a third of what the
//! compiler had to do for the layers; here all loops meet in one function, `both`. They are cut, and run, as rayon's are.
use rayon::iter::plumbing::{Producer, ProducerCallback};
use rayon::prelude::*;
use std::sync::OnceLock;

/// The loops of a parallel iterator, in place of rayon's `for_each`, `for_each_init` and `try_for_each_init`.
pub trait Each: IndexedParallelIterator {
    /// Works on each item.
    fn each(self, work: impl Fn(Self::Item) + Sync) {
        self.each_with(|| (), |(), item| work(item));
    }

    /// Works on each item, with memory that items share which a thread takes one after the other.
    fn each_with<M>(self, memory: impl Fn() -> M + Sync, work: impl Fn(&mut M, Self::Item) + Sync) {
        let len = self.len();
        self.with_producer(Loop { len, memory, work });
    }

    /// Works on each item until one of them fails, and returns an error if one did.
    fn try_each_with<M, E: Send + Sync>(
        self,
        memory: impl Fn() -> M + Sync,
        work: impl Fn(&mut M, Self::Item) -> Result<(), E> + Sync,
    ) -> Result<(), E> {
        let failed = OnceLock::new();
        self.each_with(memory, |memory, item| {
            if failed.get().is_none()
                && let Err(error) = work(memory, item)
            {
                let _ = failed.set(error); // another item's error is as good
            }
        });
        failed.into_inner().map_or(Ok(()), Err)
    }
}

impl<I: IndexedParallelIterator> Each for I {}

struct Loop<N, W> {
    len: usize,
    memory: N,
    work: W,
}

impl<T, M, N: Fn() -> M + Sync, W: Fn(&mut M, T) + Sync> ProducerCallback<T> for Loop<N, W> {
    type Output = ();

    fn callback<P: Producer<Item = T>>(self, items: P) {
        let cuts = Cuts { left: rayon::current_num_threads(), min_len: items.min_len().max(1) };
        self.cut(items, self.len, false, cuts);
    }
}

impl<N, W> Loop<N, W> {
    fn cut<M, P>(&self, items: P, len: usize, is_stolen: bool, mut cuts: Cuts)
    where
        P: Producer,
        N: Fn() -> M + Sync,
        W: Fn(&mut M, P::Item) + Sync,
    {
        if !cuts.take(len, is_stolen) {
            let mut memory = (self.memory)();
            return items.into_iter().for_each(|item| (self.work)(&mut memory, item));
        }
        let (left, right) = items.split_at(len / 2);
        let (mut left, mut right) = (Some(left), Some(right));
        both(
            &mut |is_stolen| left.take().into_iter().for_each(|items| self.cut(items, len / 2, is_stolen, cuts)),
            &mut |is_stolen| right.take().into_iter().for_each(|items| self.cut(items, len - len / 2, is_stolen, cuts)),
        );
    }
}

/// How often items are cut in two, as rayon decides it: once for each thread, and again when another thread has stolen a part.
#[derive(Clone, Copy)]
struct Cuts {
    left: usize,
    min_len: usize,
}

impl Cuts {
    /// Whether `len` items are cut.
    fn take(&mut self, len: usize, is_stolen: bool) -> bool {
        if len / 2 < self.min_len || self.left == 0 && !is_stolen {
            return false;
        }
        self.left = if is_stolen { rayon::current_num_threads().max(self.left / 2) } else { self.left / 2 };
        true
    }
}

/// Runs both, if a thread is free at the same time, and tells each whether another thread took it.
#[inline(never)]
fn both(a: &mut (dyn FnMut(bool) + Send), b: &mut (dyn FnMut(bool) + Send)) {
    rayon::join_context(|context| a(context.migrated()), |context| b(context.migrated()));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn each_item_is_taken_once() {
        for len in [0, 1, 2, 7, 1000] {
            let mut counts = vec![0; len];
            counts.par_iter_mut().enumerate().with_min_len(3).each(|(index, count)| *count += index + 1);
            assert_eq!(counts, (1..=len).collect::<Vec<_>>());
        }
    }

    #[test]
    fn the_first_error_ends_the_loop() {
        let done = AtomicUsize::new(0);
        let result = (0..100_000).into_par_iter().try_each_with(
            || (),
            |(), item| {
                done.fetch_add(1, Ordering::Relaxed);
                if item % 1000 == 999 { Err(item) } else { Ok(()) }
            },
        );
        assert_eq!(result.unwrap_err() % 1000, 999);
        assert!(done.into_inner() < 100_000);
    }

    #[test]
    fn items_are_cut_as_rayon_cuts_them() {
        let parts = |threads: usize, len: usize, min_len: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let [ours, rayons] = [AtomicUsize::new(0), AtomicUsize::new(0)];
            let count = |parts: &AtomicUsize| {
                parts.fetch_add(1, Ordering::Relaxed);
            };
            pool.install(|| {
                (0..len).into_par_iter().with_min_len(min_len).each_with(|| count(&ours), |(), _| {});
                (0..len).into_par_iter().with_min_len(min_len).for_each_init(|| count(&rayons), |(), _| {});
            });
            [ours, rayons].map(AtomicUsize::into_inner)
        };
        // With one thread nothing is stolen.
        assert_eq!(parts(1, 1000, 1), [2, 2]);
        assert_eq!(parts(1, 1000, 600), [1, 1]);
    }
}
