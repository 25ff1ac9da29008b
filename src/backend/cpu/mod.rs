//! The CPU engine: collectives over shared memory between the ranks of a host, and over TCP between hosts. The crate
//! `candle-ddp-engine` moves the bytes; this module gives it the memory of tensors.
mod check;
mod communicator;
mod in_flight;
mod memory;

#[doc(no_inline)]
pub use candle_ddp_engine::{CpuOptions, CpuTransport};
pub use communicator::CpuCommunicator;
