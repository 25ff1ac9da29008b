//! A loader's questions to the ranks that it is made for.
use candle_core::Device;
use candle_ddp_state::{Error, Result};
use std::ops::{Deref, Range};
use std::time::Duration;

/// The ranks that share a dataset: candle-ddp's `ProcessGroup`, or what dereferences to it.
#[doc(hidden)]
pub trait LoaderGroup {
    /// This rank's number.
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn world_size(&self) -> usize;

    /// Where batches go.
    fn device(&self) -> &Device;

    /// The number of virtual ranks, if there are any.
    fn virtual_ranks(&self) -> Option<usize>;

    /// The numbers of the micro-batches of a global batch that this rank computes, if there are virtual ranks.
    fn micro_batches(&self) -> Option<Range<usize>>;

    /// How long a rank waits for the others.
    fn timeout(&self) -> Duration;

    /// Compares the ranks' descriptions of their loaders. Returns the first rank whose description differs from rank 0's, and how.
    ///
    /// # Errors
    /// On every rank, if a rank has an error in place of a description, which it names, and if the ranks cannot communicate.
    fn compare_loaders(&self, description: std::result::Result<String, &Error>) -> Result<Option<(usize, String)>>;
}

impl<P: Deref<Target: LoaderGroup>> LoaderGroup for P {
    fn rank(&self) -> usize {
        (**self).rank()
    }

    fn world_size(&self) -> usize {
        (**self).world_size()
    }

    fn device(&self) -> &Device {
        (**self).device()
    }

    fn virtual_ranks(&self) -> Option<usize> {
        (**self).virtual_ranks()
    }

    fn micro_batches(&self) -> Option<Range<usize>> {
        (**self).micro_batches()
    }

    fn timeout(&self) -> Duration {
        (**self).timeout()
    }

    fn compare_loaders(&self, description: std::result::Result<String, &Error>) -> Result<Option<(usize, String)>> {
        (**self).compare_loaders(description)
    }
}
