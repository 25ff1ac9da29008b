//! What the CPU engine does over shared memory when something goes wrong: every rank ends, in time, with an error that
//! names the cause. `cpu_engine_tcp.rs` is the same over TCP, `cpu_engine_hosts.rs` over both.
#![allow(clippy::unwrap_used)]
mod construction;
mod desync;
mod leaving;
mod locked;
mod support;
mod timeout;

use support::*;

const TRANSPORT: CpuTransport = CpuTransport::SharedMemory;

fn host(_: usize) -> usize {
    0
}
