//! The engine over each kind of connection: meeting, failures, a network that breaks, and strangers. `candle-ddp` tests what its
//! collectives do with tensors.
#![allow(clippy::unwrap_used)] // a failed test may panic
#![allow(clippy::duplicate_mod)] // `failures` runs the same tests over each kind of connection
mod failures;
mod meeting;
mod network;
mod rank;
mod secret;
mod set_by;
