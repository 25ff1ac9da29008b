#![doc = include_str!("../README.md")]

pub mod float16;
mod number;
#[doc(hidden)]
pub mod simd;

pub use number::{Arithmetic, Number};
#[doc(hidden)]
pub use pulp;
