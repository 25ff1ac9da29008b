#![doc = include_str!("../README.md")]

mod error;
mod range_cache;
mod read_range;
mod tar;

pub use error::{Error, Result};
pub use range_cache::{RangeCache, RangeCacheOptions};
pub use read_range::{FileVersion, ReadRange};
pub use tar::{TarOptions, TarSample, TarShards};
