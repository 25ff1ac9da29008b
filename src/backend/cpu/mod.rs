//! The CPU engine: collectives over shared memory between the ranks of a host, and over TCP between hosts.
//!
//! How it is made (connections, threads, frames, failures, determinism) is told in the `README.md` beside this file.
mod accept;
mod algorithm;
mod check;
mod communicator;
mod connect;
mod control;
mod frame;
mod gone;
mod group;
mod hello;
mod hosts;
mod in_flight;
mod keepalive;
mod kernels;
mod lane;
mod monitor;
mod piece;
mod session;
mod share;
mod shm;
mod state;
mod storage;
mod transport;

pub use communicator::{CpuCommunicator, CpuOptions, CpuTransport};

// Shared with the other engines.
use super::{call, failure, progress, wire};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex`, also after a panic: nothing in this engine leaves a value half-changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
