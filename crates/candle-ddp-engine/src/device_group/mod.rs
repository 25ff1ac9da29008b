//! Failures in an engine whose ranks have no connections of their own to tell each other of them: they stay in touch through the
//! group's store.
//!
//! A [`DeviceGroup`] knows which of a rank's calls are in flight, and why the group has failed. [`poll`] asks the device which calls are
//! complete, [`watch`] ends the group if one has expired or the engine reports an error, and the [`HeartbeatMonitor`] exchanges
//! heartbeats, failures and progress with the other ranks. The NCCL engine runs each of them on a thread.
//!
//! Only that engine uses it. It is here since it has the history of calls, their diagnosis and the flight recorder in common with the
//! CPU engine, and since its tests need no CUDA. What all who watch processes through a store have in common is in
//! [`candle_ddp_rendezvous::liveness`].
mod group;
mod health_store;
mod heartbeat;
mod member;
mod watchdog;

pub use group::{DeviceGroup, Fence, Order, SuspectedFailure};
pub use health_store::HealthStore;
pub use heartbeat::{HeartbeatMonitor, without_asking};
pub use member::Preparing;
pub use watchdog::{Watched, poll, watch};
