//! Waiting for other ranks in NCCL.
use crate::deadline::deadline_after;
use crate::error::Failure;
use crate::warnings::warn_aloud;
use candle_ddp_engine::device_group::DeviceGroup;
use std::time::{Duration, Instant};

/// How long a rank waits, for what takes seconds at most, before it warns.
pub(super) const PATIENCE: Duration = Duration::from_secs(15);

/// A check that ends a wait if the group has failed or its time-out has expired, and that warns after `patience`.
pub(super) fn cancellation_check(
    group: &DeviceGroup,
    what: String,
    reason: String,
    patience: Duration,
) -> impl FnMut() -> std::result::Result<(), Failure> {
    let (start, deadline, mut warned) = (Instant::now(), deadline_after(group.timeout), false);
    move || {
        if let Some(failure) = group.failure() {
            return Err(failure);
        }
        let DeviceGroup { rank, timeout, .. } = *group;
        if Instant::now() < deadline {
            if !warned && start.elapsed() >= patience {
                warned = true;
                warn_aloud(format_args!("rank {rank} has waited {patience:?} in {what}: {reason}"));
            }
            return Ok(());
        }
        let reason = format!("{reason}. Look for the first error in the output of the others");
        let waiting_for = Vec::new();
        Err(Failure::TimedOut { rank, call: what.clone(), sequence: 0, timeout, waiting_for, reason })
    }
}
