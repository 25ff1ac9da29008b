//! A clock that stands still while this process is stopped, for example by Ctrl-Z or a debugger. It measures how long
//! other ranks have been silent.
use std::time::{Duration, Instant};

/// The time of a thread that sleeps between rounds of work. A sleep that took much longer than intended does not count:
/// the process or the machine was stopped then, and could not receive anything.
pub(super) struct AwakeClock {
    /// The longest that a sleep takes on a busy machine.
    longest_sleep: Duration,
    asleep_since: Instant,
    /// The time that does not count.
    stopped: Duration,
}

impl AwakeClock {
    pub(super) fn new(now: Instant, longest_sleep: Duration) -> Self {
        Self { longest_sleep, asleep_since: now, stopped: Duration::ZERO }
    }

    /// Call before the thread sleeps.
    pub(super) fn sleep(&mut self, now: Instant) {
        self.asleep_since = now;
    }

    /// Call after the thread has slept.
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
        // How long the thread worked and slept by the system's clock, and the expected time by this clock.
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
