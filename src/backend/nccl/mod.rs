//! The GPU engine: collectives through NVIDIA's NCCL, on a stream of their own beside candle's.
//!
//! How it works (streams and events, threads, failures, messages) is told in the `README.md` beside this file. Tensors
//! must be on the group's [`Device`](candle_core::Device) itself; a device made by another `Device::new_cuda` with the
//! same ordinal is another one to candle. A tensor that holds NaN makes `ReduceOp::Min` and `Max` do what NCCL does.
// C libraries are called here. Every block says why it is sound.
#![allow(unsafe_code)]

mod buffer;
mod calls;
mod comm;
mod comm_stream;
mod communicator;
mod device;
mod group;
mod health_store;
mod heartbeat;
mod identity;
mod p2p;
mod plan;
mod status;
mod stream;
mod watchdog;
mod work;

pub use communicator::{NcclCommunicator, NcclOptions};
pub(crate) use device::choose_device;
pub use device::device_count;
pub use status::version;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex`, also after a panic: nothing in this engine leaves a value half-changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `DriverError` in words.
fn cuda_error(error: cudarc::driver::DriverError) -> String {
    match error.error_string() {
        Ok(text) => format!("{:?}, {}", error.0, text.to_string_lossy()),
        // The driver itself is missing.
        Err(_) => format!("{:?}", error.0),
    }
}

fn cuda_failure(error: cudarc::driver::DriverError) -> status::NcclFailure {
    status::NcclFailure::other("the CUDA driver", &cuda_error(error))
}
