//! Which samples a rank sees, and in which batches: [`DistributedSampler`], [`DataLoader`], and PyTorch's
//! permutation, [`randperm`].
mod loader;
mod randperm;
mod sampler;

pub use loader::{Batches, DataLoader, LoaderOptions};
pub use randperm::{Permutation, randperm};
pub use sampler::{DistributedSampler, SamplerIter, SamplerOptions};
