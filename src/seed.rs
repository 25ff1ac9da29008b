//! Random numbers from seeds: a [`Generator`] whose state can be saved, reproducible initial values, and seeds that differ from rank to
//! rank.
#[doc(inline)]
pub use candle_ddp_state::seed::{init, seed_everything, var_builder};
#[doc(no_inline)]
pub use candle_ddp_tensor::seed::{Generator, default_generator};
