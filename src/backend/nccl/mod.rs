//! The NCCL engine: collectives through NVIDIA's NCCL, on a separate stream next to candle's.
//!
//! The `README.md` in this folder describes streams and events, threads, failures and messages. Tensors must be on the
//! group's own [`Device`](candle_core::Device); to candle, a device made by another `Device::new_cuda` with the same
//! ordinal is a different one. For tensors that contain NaN, `ReduceOp::Min` and `Max` behave as in NCCL.
// This module calls C libraries. Every block says why it is sound.
#![allow(unsafe_code)]

mod base;
mod batch;
mod buffer;
mod calls;
mod comm;
mod comm_stream;
mod comm_streams;
mod communicator;
mod device;
mod ffi;
mod identity;
mod launcher;
mod limit;
mod links;
mod options;
mod p2p;
mod prepared;
mod status;
mod stream;
mod threads;
mod wait;
mod work;

pub use communicator::NcclCommunicator;
pub(crate) use device::choose_device;
pub use device::device_count;
pub use options::NcclOptions;
pub use status::version;

/// Describes a `DriverError`.
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
