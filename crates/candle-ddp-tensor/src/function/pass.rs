//! The gradients of one backward pass, until the functions that need them are visited.
use crate::sum::sum;
use candle_core::{Result, Tensor};
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

thread_local! {
    /// The sums of the backward pass on this thread. candle visits all functions of a pass on the thread that called
    /// `backward`, so sums of passes on other threads never mix with these.
    static SUMS: RefCell<HashMap<u64, Sum>> = RefCell::default();
}

/// A sum of gradients so far.
#[derive(Debug)]
struct Sum {
    gradient: Tensor,
    /// Whether nothing else holds its memory.
    is_owned: bool,
}

/// A backward pass, from `begin` to its drop. Sums that nothing takes, because the pass fails, end with it.
///
/// candle does not report where its own `loss.backward()` begins. So passes that begin without this share their sums, which
/// is right as long as they succeed or fail in a function of this module, since either leaves no sums. If one of candle's
/// own operations fails in such a pass, its sums live as long as the graph.
#[derive(Debug)]
pub struct Pass {
    enclosing: HashMap<u64, Sum>,
}

impl Pass {
    /// Begins a pass on this thread.
    pub fn begin() -> Self {
        Self { enclosing: SUMS.take() }
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        SUMS.set(std::mem::take(&mut self.enclosing));
    }
}

/// Passes on `result`. An error ends the backward pass, so its sums are dropped.
pub(super) fn or_end<T>(result: Result<T>) -> Result<T> {
    if result.is_err() {
        drop(SUMS.take());
    }
    result
}

/// Names the sum of a result's gradient in each backward pass, until the function that made the result takes it.
#[derive(Debug)]
pub(super) struct GradientSum(u64);

impl Default for GradientSum {
    fn default() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

impl GradientSum {
    /// Adds a gradient, whose memory nothing else holds if it `is_owned`.
    pub(super) fn add(&self, gradient: Tensor, is_owned: bool) -> Result<()> {
        let sum = match self.take() {
            Some(earlier) => Sum { gradient: or_end(sum(&earlier, &gradient))?, is_owned: true },
            None => Sum { gradient, is_owned },
        };
        SUMS.with_borrow_mut(|sums| sums.insert(self.0, sum));
        Ok(())
    }

    pub(super) fn take(&self) -> Option<Tensor> {
        SUMS.with_borrow_mut(|sums| sums.remove(&self.0)).map(|sum| sum.gradient)
    }

    /// The same for a sum whose memory nothing else holds, if it `fits`.
    pub(super) fn take_owned(&self, fits: impl FnOnce(&Tensor) -> bool) -> Option<Tensor> {
        let fits = SUMS.with_borrow(|sums| sums.get(&self.0).is_some_and(|sum| sum.is_owned && fits(&sum.gradient)));
        if fits { self.take() } else { None }
    }
}

impl Drop for GradientSum {
    fn drop(&mut self) {
        // At the end of a thread, its sums may be gone already.
        let _left = SUMS.try_with(|sums| sums.borrow_mut().remove(&self.0));
    }
}
