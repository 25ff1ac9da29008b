//! The CPU engine: collectives over TCP between the ranks of one host or many.
//!
//! How it is made (connections, threads, frames, failures, determinism) is told in the `README.md` beside this file.
mod algorithm;
mod call;
mod check;
mod communicator;
mod connect;
mod control;
mod failure;
mod frame;
mod group;
mod hello;
mod kernels;
mod lane;
mod monitor;
mod progress;
mod session;
mod storage;
mod transport;
mod wire;

pub use communicator::{CpuCommunicator, CpuOptions};

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex`, also after a panic: nothing in this engine leaves a value half-changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
