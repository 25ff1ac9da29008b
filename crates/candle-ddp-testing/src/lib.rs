//! What the tests of several packages share. It does not depend on `candle-ddp`, so that the tests of the layers and of the images
//! are built without it, and on candle only with the feature `candle`.
#![allow(clippy::unwrap_used)] // a failed test may panic

mod errors;
pub mod http_server;
#[cfg(feature = "candle")]
pub mod layers;
mod memory;
mod port;
mod process;
mod random;
mod skip;
#[cfg(feature = "tar")]
pub mod tar_files;
#[cfg(feature = "candle")]
mod tensors;
#[cfg(feature = "candle")]
pub mod torch_file;

pub use errors::assert_error;
pub use memory::peak_memory;
pub use port::free_port;
pub use process::{test_arguments, test_process};
pub use random::Random;
pub use skip::{skip, skip_unless};
#[cfg(feature = "candle")]
pub use tensors::{assert_close, bits, fill, floats, gradients, new_var, sine, tensor, values, var, waves};
