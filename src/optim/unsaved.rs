//! Notices a schedule of learning rates that a run does not save.
use std::cell::Cell;

thread_local! {
    /// Whether a schedule of this thread has made a step since the last checkpoint.
    static STEPPED: Cell<bool> = const { Cell::new(false) };
    /// Whether a schedule's state was taken.
    static SAVED: Cell<bool> = const { Cell::new(false) };
}

pub(super) fn stepped() {
    STEPPED.set(true);
}

pub(super) fn saved() {
    SAVED.set(true);
}

/// Runs `save`, which takes the states of a run. Returns its result, and whether a schedule has made steps since the last call and
/// was not among the states.
pub(crate) fn watch<T>(save: impl FnOnce() -> T) -> (T, bool) {
    SAVED.set(false);
    let result = save();
    (result, STEPPED.take() && !SAVED.get())
}
