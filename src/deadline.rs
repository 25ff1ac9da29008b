//! Deadlines that any `Duration` can give, since `Instant + Duration` panics beyond what the clock can express.
use std::time::{Duration, Instant};

/// What a time-out beyond the clock's range becomes: ten years.
const LONGEST: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

/// The moment at which `timeout` from now is over.
pub(crate) fn deadline_after(timeout: Duration) -> Instant {
    let now = Instant::now();
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
