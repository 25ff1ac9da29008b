//! What the CPU engine does over TCP when something goes wrong: the same as over shared memory.
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

const TRANSPORT: CpuTransport = CpuTransport::Tcp;

fn host(rank: usize) -> usize {
    rank
}
