//! Random numbers from seeds: the same in every run, on every device, and for any number of threads.
mod default;
mod generator;
mod philox;
mod replay;

pub use default::default_generator;
pub use generator::Generator;

#[doc(hidden)]
pub use self::{
    generator::Draw,
    replay::{Drawn, Replay, draw, forget_draws, is_replaying, take_drawn},
};
