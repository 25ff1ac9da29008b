//! Failures over shared memory.
#[path = "construction.rs"]
mod construction;
#[path = "desync.rs"]
mod desync;
#[path = "leaving.rs"]
mod leaving;
#[path = "locked.rs"]
mod locked;
#[path = "support.rs"]
mod support;
#[path = "timeout.rs"]
mod timeout;

use support::*;

const TRANSPORT: CpuTransport = CpuTransport::SharedMemory;

fn host(_: usize) -> usize {
    0
}
