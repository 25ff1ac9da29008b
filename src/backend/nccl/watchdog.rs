//! The thread that watches the calls of a group for errors of NCCL and for deadlines. It never waits for the network.
use super::group::{Group, SuspectedFailure};
use super::heartbeat::PATIENCE;
use crate::error::Failure;
use std::time::{Duration, Instant};

/// The communicators of the group.
pub(super) trait Watched {
    /// The first error, if any.
    fn error(&self) -> Option<String>;

    /// Ends all calls, on the GPU too.
    fn abort(&self);
}

/// Watches until the group ends, in good order or with a failure.
///
/// `unasked` gives the failure behind a suspected one if the heartbeat monitor, which asks the other ranks, does not
/// find it in time.
pub(super) fn run(group: &Group, watched: &dyn Watched, unasked: &dyn Fn(&SuspectedFailure) -> Failure) {
    const TICK: Duration = Duration::from_millis(20);
    loop {
        let over = group.is_over(TICK);
        if group.failure().is_none() && !over {
            let seen = || watched.error().map(SuspectedFailure::Broken).or_else(|| group.sweep(Instant::now()));
            // Other threads may have noticed it first.
            let suspected = group.suspected().or_else(seen);
            let Some(suspected) = suspected else { continue };
            group.suspect(suspected.clone());
            if group.await_failure(PATIENCE + Duration::from_secs(4)).is_none() {
                group.fail(unasked(&suspected));
            }
        }
        if group.failure().is_some() {
            watched.abort();
            return;
        }
        if over {
            return;
        }
    }
}

#[cfg(test)]
mod tests;
