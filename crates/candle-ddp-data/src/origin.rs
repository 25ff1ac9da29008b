//! Where the batches come from with which a thread computes.
use std::cell::{Cell, RefCell};
use std::collections::HashSet;

/// The origin of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// A number of its loader.
    pub loader: usize,
    pub epoch: u64,
}

thread_local! {
    /// The origin of the batch that this thread has got last.
    static LAST: Cell<Option<Origin>> = const { Cell::new(None) };
    /// The origin of the last batch of a forward pass under `no_grad`.
    static EVALUATED: Cell<Option<Origin>> = const { Cell::new(None) };
    /// The loaders with whose batches this thread has run backward passes.
    static TRAINED: RefCell<HashSet<usize>> = RefCell::default();
}

/// A loader has given the program a batch.
pub fn delivered(loader: usize, epoch: u64) {
    LAST.set(Some(Origin { loader, epoch }));
}

pub fn last() -> Option<Origin> {
    LAST.get()
}

/// A forward pass under `no_grad` begins.
pub fn evaluates() {
    EVALUATED.set(LAST.get());
}

/// A backward pass begins.
pub fn trains() {
    if let Some(last) = LAST.get() {
        TRAINED.with_borrow_mut(|trained| trained.insert(last.loader));
    }
}

/// Whether this epoch was read for an evaluation, as far as is known when the epoch ends.
pub fn is_evaluation(loader: usize, epoch: u64) -> bool {
    EVALUATED.get() == Some(Origin { loader, epoch }) && !TRAINED.with_borrow(|trained| trained.contains(&loader))
}
