//! A curve of bounded length.

/// The most points of a curve: more than a chart has columns.
const MOST: usize = 2048;

/// Points in the order of their positions. When they become too many, every second one is left out.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Series {
    points: Vec<(f64, f64)>,
    /// How many points one stands for.
    stride: usize,
    skipped: usize,
}

impl Default for Series {
    fn default() -> Self {
        Self { points: Vec::new(), stride: 1, skipped: 0 }
    }
}

impl Series {
    /// Adds a point. One at an earlier position takes the place of all that came after it: a run has gone back to a checkpoint.
    pub(super) fn push(&mut self, at: f64, value: f64) {
        while self.points.last().is_some_and(|(last, _)| *last >= at) {
            self.points.pop();
        }
        self.skipped += 1;
        if self.skipped < self.stride && !self.points.is_empty() {
            return;
        }
        self.skipped = 0;
        self.points.push((at, value));
        if self.points.len() > MOST {
            let mut index = 0;
            self.points.retain(|_| {
                index += 1;
                index % 2 == 1
            });
            self.stride *= 2;
        }
    }

    pub(super) fn points(&self) -> &[(f64, f64)] {
        &self.points
    }
}
