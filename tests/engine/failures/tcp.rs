//! Failures over TCP.
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

const TRANSPORT: CpuTransport = CpuTransport::Tcp;

fn host(rank: usize) -> usize {
    rank
}
