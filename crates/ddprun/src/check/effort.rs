//! How much a check measures.
use std::time::Duration;

/// How much is measured.
#[derive(Debug, Clone, Copy)]
pub(super) struct Effort {
    /// Of products and copies.
    pub(super) repetitions: usize,
    /// Of messages that measure latency and bandwidth.
    pub(super) exchanges: [usize; 2],
    /// The time for each size of all-reduce.
    pub(super) collective: Duration,
    /// The most bytes of a call.
    pub(super) most_bytes: usize,
}

impl Effort {
    pub(super) const FULL: Self =
        Self { repetitions: 15, exchanges: [200, 10], collective: Duration::from_secs(1), most_bytes: usize::MAX };
    pub(super) const QUICK: Self =
        Self { repetitions: 5, exchanges: [50, 4], collective: Duration::from_millis(200), most_bytes: usize::MAX };
}
