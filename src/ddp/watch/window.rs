//! Accumulation of gradients over the end of an epoch.
use crate::origin::{self, Origin};
use crate::warnings::warn_aloud;

/// The passes whose gradients add up to the gradients of one step.
#[derive(Default)]
pub(in crate::ddp) struct Window {
    passes: usize,
    first: Option<Origin>,
    /// Whether they had batches of two epochs of one loader.
    crosses: bool,
    /// The number of passes that the previous window had.
    previous: Option<usize>,
    said: bool,
}

impl Window {
    /// Counts a pass of a model, whose gradients may add up under `no_sync`. A loop that makes a step after every n batches of an
    /// epoch leaves some passes at its end, and its next step has these in addition to its own n: rank 0 says so. A loop that
    /// counts across epochs has n each time.
    pub(in crate::ddp) fn pass(&mut self, is_last: bool, rank: usize) {
        if let Some([passes, previous]) = self.count(origin::last(), is_last).filter(|_| rank == 0) {
            warn_aloud(format_args!(
                "a step has the gradients of {passes} passes, and the one before it had {previous}: what was left of an epoch under \
                 no_sync has gone into the first step of the next one. Make a step at the end of each epoch too, divided by the number \
                 of its passes, or leave the rest out, as with `loader.epoch(n).take(batches / {previous} * {previous})`"
            ));
        }
    }

    /// Counts a pass. Returns how many passes the window and the one before had, once, if the last pass ends a window over the end
    /// of an epoch, and it is larger.
    fn count(&mut self, origin: Option<Origin>, is_last: bool) -> Option<[usize; 2]> {
        self.passes += 1;
        self.first = self.first.or(origin);
        self.crosses |= matches!((self.first, origin), (Some(first), Some(now)) if first.loader == now.loader && first.epoch != now.epoch);
        if !is_last {
            return None;
        }
        let Self { passes, crosses, previous, said, .. } = *self;
        *self = Self { previous: Some(passes), said, ..Self::default() };
        let larger = previous.filter(|previous| crosses && passes > *previous && !said)?;
        self.said = true;
        Some([passes, larger])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps over windows of `n` batches in three epochs of 10 batches. Returns how often something is said.
    fn said(n: usize, is_last: impl Fn(usize, usize) -> bool) -> usize {
        let mut window = Window::default();
        let batches = (0..3).flat_map(|epoch| (0..10).map(move |batch| (epoch, batch)));
        let said = batches.filter(|(epoch, batch)| {
            let origin = Origin { loader: 1, epoch: *epoch as u64 };
            let count = window.count(Some(origin), is_last(epoch * 10 + batch, *batch));
            count.inspect(|count| assert_eq!(*count, [n + 10 % n, n])).is_some()
        });
        said.count()
    }

    #[test]
    fn a_rest_that_goes_into_the_next_epoch_is_said_once() {
        // Windows that are counted in each epoch, without a step for the rest.
        assert_eq!(said(4, |_, batch| batch % 4 == 3), 1);
        // With a step for it, counted over all epochs, or without a rest.
        assert_eq!(said(4, |_, batch| batch % 4 == 3 || batch == 9), 0);
        assert_eq!(said(4, |all, _| all % 4 == 3), 0);
        assert_eq!(said(5, |_, batch| batch % 5 == 4), 0);
    }

    #[test]
    fn other_loaders_and_larger_windows_are_no_rest() {
        let mut window = Window::default();
        let mut count = |loader, epoch, is_last| window.count(Some(Origin { loader, epoch }), is_last).is_some();
        // A larger number of passes from the second epoch on, and a model that trains with two loaders.
        assert!(![(1, 0, true), (1, 1, false), (1, 1, true)].map(|(l, e, last)| count(l, e, last)).contains(&true));
        assert!(![(1, 1, false), (2, 5, false), (2, 5, true)].map(|(l, e, last)| count(l, e, last)).contains(&true));
        assert!(window.count(None, false).is_none() && window.count(None, true).is_none());
    }
}
