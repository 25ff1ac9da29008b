//! The threads that watch the calls of a group. The poller asks the device's driver and the engine's library, which may hold it up: a
//! driver that waits for a stuck call in another thread may not even answer whether an event has happened. The watchdog calls
//! neither, and waits for no network, so that deadlines hold and the communicators are aborted, which also ends the stuck call.
use super::group::{DeviceGroup, SuspectedFailure};
use super::heartbeat::PATIENCE;
use crate::error::Failure;
use std::time::{Duration, Instant};

/// The time between two looks at the calls.
const TICK: Duration = Duration::from_millis(20);

/// The communicators of the group.
pub trait Watched {
    /// The first error, if any.
    fn error(&self) -> Option<String>;

    /// Ends all calls, on the GPU too.
    fn abort(&self);
}

/// Looks for completed calls, for expired ones and for errors, until the group ends or has a problem.
pub fn poll(group: &DeviceGroup, watched: &dyn Watched) {
    while !group.is_over(TICK) && group.failure().is_none() && group.suspected().is_none() {
        let seen = watched.error().map(SuspectedFailure::Broken).or_else(|| group.sweep(Instant::now()));
        seen.into_iter().for_each(|suspected| group.suspect(suspected));
    }
}

/// Watches until the group ends, in good order or with a failure.
///
/// `unasked` gives the failure behind a suspected one if the heartbeat monitor, which asks the other ranks, does not
/// find it in time.
pub fn watch(group: &DeviceGroup, watched: &dyn Watched, unasked: &dyn Fn(&SuspectedFailure) -> Failure) {
    /// A poller that was silent for so long is held up in the driver.
    const HELD_UP: Duration = Duration::from_secs(30);
    loop {
        let over = group.is_over(TICK);
        if group.failure().is_none() && !over {
            let suspected = group.suspected().or_else(|| group.expired_unseen(Instant::now(), HELD_UP));
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
