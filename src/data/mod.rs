//! Each rank's part of a dataset, in batches: [`DataLoader`], [`DistributedSampler`], [`TensorDataset`], and PyTorch's
//! permutation, [`randperm`]. `docs/data.md` shows how they are used.
mod batch;
mod collate;
mod dataset;
mod iter;
mod loader;
mod micro_batch;
mod options;
mod randperm;
mod recipe;
mod sampler;
mod state;
mod tensor_dataset;
#[cfg(feature = "cuda")]
mod upload;
mod workers;

pub use batch::Batch;
pub use collate::{Collate, default_collate};
pub use dataset::Dataset;
pub use iter::LoaderIter;
pub use loader::DataLoader;
pub use micro_batch::{MicroBatch, MicroBatches};
pub use options::LoaderOptions;
pub use randperm::{Permutation, randperm};
pub use sampler::{DistributedSampler, Remainder, SamplerIter, SamplerOptions};
pub use state::LoaderState;
pub use tensor_dataset::{Row, TensorDataset};
