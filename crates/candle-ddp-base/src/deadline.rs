//! Deadlines from any `Duration`, since `Instant + Duration` panics beyond the clock's range.
use std::time::{Duration, Instant};

/// Replaces time-outs beyond the clock's range: ten years.
const LONGEST: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

/// The moment `timeout` from now.
pub fn deadline_after(timeout: Duration) -> Instant {
    deadline_from(Instant::now(), timeout)
}

/// The moment `timeout` after `now`, for callers that have already read the clock.
pub fn deadline_from(now: Instant, timeout: Duration) -> Instant {
    now.checked_add(timeout).unwrap_or_else(|| now + LONGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_timeout_has_a_deadline() {
        let left = |timeout| deadline_after(timeout).saturating_duration_since(Instant::now());
        assert!(left(Duration::MAX) > LONGEST / 2);
        assert!(left(Duration::from_secs(60)) <= Duration::from_secs(60));
        assert!(left(Duration::ZERO).is_zero());
    }
}
