//! Random numbers that a recomputed function draws again.
use super::Draw;
use std::cell::RefCell;

/// The random numbers that layers have drawn while a function was computed.
#[derive(Debug)]
pub struct Replay(Vec<Draw>);

#[derive(Default)]
struct State {
    /// The draws to repeat, from the last to the first.
    play: Option<Vec<Draw>>,
    /// The draws so far.
    record: Option<Vec<Draw>>,
}

thread_local! {
    static STATE: RefCell<State> = RefCell::default();
}

/// Restores the previous state, even after a panic.
struct Restore<F: FnMut(&mut State)>(F);

impl<F: FnMut(&mut State)> Drop for Restore<F> {
    fn drop(&mut self) {
        STATE.with_borrow_mut(|state| (self.0)(state));
    }
}

impl Replay {
    /// Runs `work` and records its draws.
    pub fn record<T>(work: impl FnOnce() -> T) -> (Self, T) {
        let mut outer = STATE.with_borrow_mut(|state| state.record.replace(Vec::new()));
        let mut drawn = Vec::new();
        let result = {
            let _restore = Restore(|state| {
                drawn = std::mem::replace(&mut state.record, outer.take()).unwrap_or_default();
                // Draws of a nested function belong to the enclosing one as well.
                if let Some(outer) = &mut state.record {
                    outer.extend(&drawn);
                }
            });
            work()
        };
        (Self(drawn), result)
    }

    /// Runs `work`, which repeats the recorded draws.
    pub fn play<T>(&self, work: impl FnOnce() -> T) -> T {
        let again = self.0.iter().rev().copied().collect();
        let mut outer = STATE.with_borrow_mut(|state| state.play.replace(again));
        let _restore = Restore(|state| state.play = outer.take());
        work()
    }
}

/// The draws of a layer: new ones from `new`, or the recorded ones if the layer is recomputed.
pub fn draw(new: impl FnOnce() -> Draw) -> Draw {
    let again = STATE.with_borrow_mut(|state| state.play.as_mut().and_then(Vec::pop));
    let drawn = again.unwrap_or_else(new);
    STATE.with_borrow_mut(|state| {
        if let Some(record) = &mut state.record {
            record.push(drawn);
        }
    });
    drawn
}
