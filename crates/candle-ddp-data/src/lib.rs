#![doc = include_str!("../README.md")]

mod batch;
mod blocks;
mod collate;
mod dataset;
mod deal;
mod group;
#[cfg(feature = "vision")]
mod images;
mod indices;
mod iter;
mod late;
mod lengths;
mod loader;
mod micro_batch;
mod options;
mod order;
#[doc(hidden)]
pub mod origin;
mod pack;
mod randperm;
mod recipe;
mod sampler;
mod shards;
mod state;
mod tensor_dataset;
#[cfg(feature = "cuda")]
mod upload;
mod weighted;
mod workers;

pub use batch::Batch;
pub use blocks::{BlockOptions, BlockShuffle};
#[doc(no_inline)]
pub use candle_ddp_webdataset::{FileVersion, RangeCache, RangeCacheOptions, ReadRange, TarSample, TarShards};
pub use collate::{Collate, default_collate};
pub use dataset::Dataset;
pub use group::LoaderGroup;
pub use iter::LoaderIter;
pub use lengths::{LengthBatches, LengthOptions};
pub use loader::DataLoader;
pub use micro_batch::MicroBatch;
pub use options::{LoaderOptions, Remainder, SamplerOptions};
pub use order::{EpochOrder, Order};
pub use pack::{Packed, pack};
pub use randperm::randperm;
pub use sampler::DistributedSampler;
pub use state::LoaderState;
pub use tensor_dataset::{Row, TensorDataset};
pub use weighted::WeightedSampler;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
