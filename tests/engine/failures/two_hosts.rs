//! Failures in a group that spans hosts: rank 1, which is most often the one that fails, shares its host with rank 2.
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

const TRANSPORT: CpuTransport = CpuTransport::Auto;

fn host(rank: usize) -> usize {
    [0, 1, 1, 0][rank]
}
