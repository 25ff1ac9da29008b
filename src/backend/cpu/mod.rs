//! The CPU engine: collectives over shared memory between the ranks of a host, and over TCP between hosts.
//!
//! The `README.md` in this folder describes its connections, threads, frames, failures and determinism.
mod accept;
mod algorithm;
mod call_sites;
mod check;
mod communicator;
mod connect;
mod connector;
mod control;
mod data_path;
mod door;
mod frame;
#[cfg(any(test, fuzzing))]
mod fuzz;
mod gone;
mod group;
mod handshake;
mod host_monitor;
mod hosts;
mod in_flight;
mod keepalive;
mod keys;
mod meeting;
mod monitor;
mod news;
mod options;
mod piece;
mod reach;
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
#[cfg(any(test, fuzzing))]
pub(crate) use fuzz::mesh as fuzz_mesh;
pub use options::{CpuOptions, CpuTransport};
