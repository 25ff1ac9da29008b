//! Failures in an engine whose ranks have no connections of their own to tell each other of them: they stay in touch through the
//! group's store.
//!
//! A [`Group`] knows which of a rank's calls are in flight, and why the group has failed. [`poll`] asks the device which calls are
//! complete, [`watch`] ends the group if one has expired or the engine reports an error, and the [`HeartbeatMonitor`] exchanges
//! heartbeats, failures and progress with the other ranks. The NCCL engine runs each of them on a thread.
mod group;
mod health_store;
mod heartbeat;
mod member;
mod watchdog;

pub use group::{Fence, Group, Order, SuspectedFailure};
pub use health_store::HealthStore;
pub use heartbeat::{HeartbeatMonitor, without_asking};
pub use member::Preparing;
pub use watchdog::{Watched, poll, watch};
