#![doc = include_str!("../README.md")]

mod range_cache;
mod read_range;
mod tar;

pub use candle_ddp_base::{Error, Result};
pub use range_cache::{RangeCache, RangeCacheOptions};
pub use read_range::{FileVersion, ReadRange};
pub use tar::{TarSample, TarShards};
