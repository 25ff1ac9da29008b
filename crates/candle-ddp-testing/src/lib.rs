//! What the tests of several packages share. It does not depend on `candle-ddp`, so that the tests of the layers and of the images
//! are built without it, and on candle only with the feature `candle`.
#![allow(clippy::unwrap_used)] // a failed test may panic

#[cfg(feature = "candle")]
mod between;
#[cfg(feature = "candle")]
pub mod checkpointed;
mod errors;
mod gpu_counts;
#[cfg(feature = "candle")]
pub mod hashed;
pub mod http_server;
#[cfg(feature = "candle")]
pub mod layers;
mod memory;
#[cfg(feature = "candle")]
mod mlp;
mod port;
mod process;
mod programs;
mod random;
mod skip;
#[cfg(feature = "tar")]
pub mod tar_files;
#[cfg(feature = "candle")]
mod tensors;
#[cfg(feature = "candle")]
pub mod torch_file;

#[cfg(feature = "candle")]
pub use between::{Between, failing};
pub use errors::assert_error;
pub use gpu_counts::{is_operation, take_counts};
pub use memory::peak_memory;
#[cfg(feature = "candle")]
pub use mlp::Mlp;
pub use port::free_port;
pub use process::{test_arguments, test_process};
pub use programs::{
    ddprun, example, launch_example, launch_nodes, launch_test, pass_on_a_full_disk, start_ranks, succeed,
};
pub use random::Random;
pub use skip::{skip, skip_unless};
#[cfg(feature = "candle")]
pub use tensors::{assert_close, bits, fill, floats, gradients, new_var, plain, sine, tensor, values, var, waves};
