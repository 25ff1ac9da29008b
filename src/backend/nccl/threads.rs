//! The threads of a group.
use crate::error::Failure;
use crate::{Result, thread};
use candle_ddp_engine::device_group::DeviceGroup;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Starts one of the group's threads. A panic in it ends the group.
pub(super) fn spawn(
    group: &Arc<DeviceGroup>,
    name: &str,
    body: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>> {
    let (rank, group, own_name) = (group.rank, group.clone(), name.to_string());
    let body = move || {
        if catch_unwind(AssertUnwindSafe(body)).is_err() {
            group.fail(Failure::PeerFailed { peer: rank, reason: format!("its {own_name} panicked") });
        }
    };
    Ok(thread::spawn(format!("nccl-{rank}-{name}"), body)?)
}

pub(super) fn join(thread: JoinHandle<()>) {
    if thread.join().is_err() {
        log::error!("a thread of the NCCL engine panicked");
    }
}

/// Like [`join`], but leaves a thread behind if it has not ended at `deadline`.
pub(super) fn join_until(thread: JoinHandle<()>, deadline: Instant) {
    const PAUSE: Duration = Duration::from_millis(1);
    while !thread.is_finished() {
        if Instant::now() >= deadline {
            let name = thread.thread().name().unwrap_or("a thread of the NCCL engine").to_string();
            log::warn!("{name} does not end: NCCL, the GPU or the store does not answer. It is left behind");
            return;
        }
        std::thread::sleep(PAUSE);
    }
    join(thread);
}
