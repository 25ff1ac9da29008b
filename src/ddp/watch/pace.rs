//! How fast this rank computes micro-batches.
use std::time::{Duration, Instant};

/// The times of micro-batches, from the beginning of a forward pass to the end of the backward pass, without what is sent.
#[derive(Debug, Default)]
pub(in crate::ddp) struct Pace {
    began: Option<Instant>,
    count: u32,
    total: Duration,
}

impl Pace {
    /// Call when a forward pass begins.
    pub(in crate::ddp) fn begin(&mut self, now: Instant) {
        self.began = Some(now);
    }

    /// Call when its backward pass has ended. The passes of the first step do not count, since they allocate memory.
    pub(in crate::ddp) fn end(&mut self, now: Instant, counts: bool) {
        if let Some(began) = self.began.take().filter(|_| counts) {
            self.count = self.count.saturating_add(1);
            self.total += now - began;
        }
    }

    pub(in crate::ddp) fn per_second(&self) -> Option<f64> {
        (!self.total.is_zero()).then(|| f64::from(self.count) / self.total.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_passes_after_the_first_step_count() {
        let start = Instant::now();
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        let mut pace = Pace::default();
        pace.begin(at(0));
        pace.end(at(900), false);
        assert_eq!(pace.per_second(), None);
        // The second forward pass is that of the backward pass; the first was an evaluation.
        pace.begin(at(1000));
        pace.begin(at(2000));
        pace.end(at(2010), true);
        pace.end(at(2900), true);
        pace.begin(at(3000));
        pace.end(at(3030), true);
        assert_eq!(pace.per_second(), Some(50.));
    }
}
