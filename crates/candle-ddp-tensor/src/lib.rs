#![doc = include_str!("../README.md")]

mod arrange;
#[doc(hidden)]
pub mod borrow;
pub mod collate;
#[doc(hidden)]
pub mod column_sums;
#[doc(hidden)]
pub mod copy;
mod element;
#[doc(hidden)]
pub mod error;
mod float16;
pub mod function;
#[doc(hidden)]
pub mod kernels;
mod math;
mod memory_format;
mod number;
#[doc(hidden)]
pub mod pack;
pub mod seed;
#[doc(hidden)]
pub mod simd;
mod sum;

pub use element::{Element, Real};
pub use error::{Error, Result};
pub use memory_format::MemoryFormat;

#[doc(hidden)]
pub use element::{DTYPES, accumulator};
#[doc(hidden)]
pub use number::{Arithmetic, Number};
#[doc(hidden)]
pub use pulp;
