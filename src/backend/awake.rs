//! A clock that stands still while this process is stopped (by Ctrl-Z, or a debugger), for judging the silence of others.
use std::time::{Duration, Instant};

/// The time of a thread that sleeps between rounds of work, without that in which it slept much longer than it wanted:
/// then the process was stopped, or the machine, and whatever came from others meanwhile was not seen.
pub(super) struct AwakeClock {
    /// What a sleep takes at most, on a machine that is busy as well.
    longest_sleep: Duration,
    asleep_since: Instant,
    /// What is left out.
    stopped: Duration,
}

impl AwakeClock {
    pub(super) fn new(now: Instant, longest_sleep: Duration) -> Self {
        Self { longest_sleep, asleep_since: now, stopped: Duration::ZERO }
    }

    /// The thread goes to sleep.
    pub(super) fn sleep(&mut self, now: Instant) {
        self.asleep_since = now;
    }

    /// The thread has slept.
    pub(super) fn wake(&mut self, now: Instant) {
        let slept = now.saturating_duration_since(self.asleep_since);
        self.stopped += slept.saturating_sub(self.longest_sleep);
    }

    /// The time by this clock.
    pub(super) fn at(&self, now: Instant) -> Instant {
        now.checked_sub(self.stopped).unwrap_or(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_is_left_out_and_nothing_else() {
        let seconds = Duration::from_secs;
        let start = Instant::now();
        let mut clock = AwakeClock::new(start, seconds(2));
        // By the system's clock: how long the thread worked, and slept; and what the clock says then.
        let rounds = [(0, 1, 1), (3, 1, 5), (0, 3600, 7), (1, 1, 9), (10, 2, 21), (0, 50, 23)];
        let mut now = start;
        for (worked, slept, expected) in rounds {
            now += seconds(worked);
            clock.sleep(now);
            now += seconds(slept);
            clock.wake(now);
            assert_eq!(clock.at(now) - start, seconds(expected), "worked {worked}, slept {slept}");
        }
        assert_eq!(clock.at(now + seconds(5)) - start, seconds(28));
    }
}
