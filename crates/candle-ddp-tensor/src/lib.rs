#![doc = include_str!("../README.md")]

mod arrange;
#[doc(hidden)]
pub mod borrow;
#[doc(hidden)]
pub mod carry;
pub mod collate;
#[doc(hidden)]
pub mod column_sums;
#[doc(hidden)]
pub mod copy;
mod element;
#[doc(hidden)]
pub mod error;
#[doc(hidden)]
pub mod finite;
pub mod function;
#[doc(hidden)]
pub mod hold;
#[doc(hidden)]
pub mod kernels;
mod math;
mod memory_format;
#[doc(hidden)]
pub mod pack;
#[doc(hidden)]
pub mod parallel;
mod read;
pub mod seed;
mod sum;

pub use element::{Element, Real};
pub use error::{Error, Result};
pub use memory_format::MemoryFormat;

#[doc(hidden)]
pub use {
    candle_ddp_simd::{pulp, vectorise},
    element::{DTYPES, accumulator},
    read::{Readable, read_tensor},
};
