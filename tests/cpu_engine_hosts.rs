//! What the CPU engine does when something goes wrong in a group that spans hosts: the same as over shared memory alone.
#![allow(clippy::unwrap_used)]
#[path = "cpu_engine/construction.rs"]
mod construction;
#[path = "cpu_engine/desync.rs"]
mod desync;
#[path = "cpu_engine/leaving.rs"]
mod leaving;
#[path = "cpu_engine/locked.rs"]
mod locked;
#[path = "cpu_engine/support.rs"]
mod support;
#[path = "cpu_engine/timeout.rs"]
mod timeout;

use support::*;

const TRANSPORT: CpuTransport = CpuTransport::Auto;

/// Rank 1, which is most often the one that fails, shares its host with rank 2.
fn host(rank: usize) -> usize {
    [0, 1, 1, 0][rank]
}
