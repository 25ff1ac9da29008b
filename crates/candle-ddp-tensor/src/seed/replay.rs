//! Random numbers that a recomputed function draws again.
use super::generator::Maker;
use super::{Draw, Generator};
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
    /// From which generators layers have drawn on this thread.
    drawn: Drawn,
}

/// From which generators layers have drawn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Drawn {
    /// From no generator.
    #[default]
    Nothing,
    /// From the generator of the micro-batch of this number.
    MicroBatch(usize),
    /// From other generators, or those of several micro-batches.
    Others,
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

/// Whether a function is computed again on this thread: its layers leave their state alone, since the first time has changed it.
pub fn is_replaying() -> bool {
    STATE.with_borrow(|state| state.play.is_some())
}

/// The draws of a layer: the next `count` numbers of `generator`, or the recorded ones if the layer is recomputed.
pub fn draw(generator: &mut Generator, count: usize) -> Draw {
    STATE.with_borrow_mut(|state| {
        let again = state.play.as_mut().and_then(Vec::pop);
        if again.is_none() {
            state.drawn = match (state.drawn, generator.maker()) {
                (Drawn::Nothing, Maker::MicroBatch(number)) => Drawn::MicroBatch(number),
                (Drawn::MicroBatch(earlier), Maker::MicroBatch(number)) if earlier == number => state.drawn,
                _ => Drawn::Others,
            };
        }
        let drawn = again.unwrap_or_else(|| generator.draw(count));
        if let Some(record) = &mut state.record {
            record.push(drawn);
        }
        drawn
    })
}

/// From which generators layers have drawn on this thread since the last call of this function or of [`forget_draws`].
pub fn take_drawn() -> Drawn {
    STATE.with_borrow_mut(|state| std::mem::take(&mut state.drawn))
}

/// Makes [`take_drawn`] begin anew.
pub fn forget_draws() {
    take_drawn();
}
