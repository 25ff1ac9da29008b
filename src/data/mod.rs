//! Which samples a rank sees, and in which batches: [`DistributedSampler`], [`DataLoader`], [`StatefulDataLoader`] with
//! worker threads, and PyTorch's permutation, [`randperm`]. `docs/data.md` shows how they are used.
mod batch;
mod collate;
mod dataset;
mod loader;
mod randperm;
mod recipe;
mod sampler;
mod state;
mod stateful;
mod stateful_iter;
#[cfg(feature = "cuda")]
mod upload;
mod workers;

pub use batch::Batch;
pub use collate::{Collate, default_collate};
pub use dataset::Dataset;
pub use loader::{Batches, DataLoader, LoaderOptions};
pub use randperm::{Permutation, randperm};
pub use sampler::{DistributedSampler, SamplerIter, SamplerOptions};
pub use state::LoaderState;
pub use stateful::StatefulDataLoader;
pub use stateful_iter::LoaderIter;
