//! The CPU engine: collectives over shared memory between the ranks of a host, and over TCP between hosts.
//!
//! How it is made (connections, threads, frames, failures, determinism) is told in the `README.md` beside this file.
mod accept;
mod algorithm;
mod check;
mod communicator;
mod connect;
mod control;
mod data_path;
mod frame;
mod gone;
mod group;
mod handshake;
mod hosts;
mod in_flight;
mod keepalive;
mod monitor;
mod options;
mod piece;
mod reduction;
mod root_cause;
mod session;
mod shm;
mod shm_session;
mod state;
mod storage;
mod tcp_session;
mod transport;
mod transport_error;
mod work_queue;

pub use communicator::CpuCommunicator;
pub use options::{CpuOptions, CpuTransport};

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex`, also after a panic: nothing in this engine leaves a value half-changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
