//! The engine over each kind of connection: meeting, failures, a network that breaks, and strangers. `candle-ddp` tests what its
//! collectives do with tensors.
//!
//! Most tests wait, and tests begin in the order of their names: the longest, of `broken_network`, begin first.
#![allow(clippy::unwrap_used)] // a failed test may panic
#![allow(clippy::duplicate_mod)] // `failures` runs the same tests over each kind of connection
mod broken_network;
mod failures;
mod meeting;
mod rank;
mod secret;
mod set_by;
mod waits;
