//! How ranks share a dataset, and how a loader makes batches.
use super::LoaderGroup;
use candle_ddp_state::{Error, Result};
use std::time::Duration;

/// How a [`DistributedSampler`](super::DistributedSampler) deals the dataset out. The defaults are PyTorch's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SamplerOptions {
    /// Permute the dataset anew in each epoch. Default: true.
    pub shuffle: bool,
    /// The seed of the permutation, the same on all ranks; the epoch is added to it. Default: 0.
    ///
    /// As in PyTorch, only the low 32 bits of the sum count. The sum wraps, so that a negative seed of PyTorch's can be
    /// given as `seed as u64`.
    pub seed: u64,
    /// The treatment of samples that cannot be shared equally. Default: [`Remainder::Pad`].
    pub remainder: Remainder,
}

impl Default for SamplerOptions {
    fn default() -> Self {
        Self { shuffle: true, seed: 0, remainder: Remainder::default() }
    }
}

/// The behaviour of a [`DistributedSampler`](super::DistributedSampler) if the length of the dataset is not a multiple of the number of ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Remainder {
    /// Repeat the head of the epoch until it is: PyTorch's default.
    #[default]
    Pad,
    /// Drop the tail of the epoch, fewer samples than there are ranks: PyTorch's `drop_last=True`.
    Drop,
    /// Give the first ranks one sample more than the others. Each sample is there exactly once, as an evaluation needs it.
    ///
    /// Some ranks may then have one batch less than others, so nothing that all ranks do together, such as
    /// `DistributedDataParallel::backward`, may happen once per batch. In a group with virtual ranks
    /// (`InitOptions::virtual_ranks`), the samples are those of the ranks, not of micro-batches.
    Uneven,
}

/// How a [`DataLoader`](super::DataLoader) makes batches. The defaults are those of PyTorch's `DataLoader` with a
/// `DistributedSampler`.
///
/// In a group with virtual ranks (`InitOptions::virtual_ranks`), the batches are micro-batches of
/// [`batch_size`](Self::batch_size) samples, and [`DataLoader::micro_batches`](super::DataLoader::micro_batches) gives them with their
/// numbers. Their samples do not depend on the number of ranks. Every global batch is full: the last one is filled from the head of
/// the epoch, or dropped with [`drop_last`](Self::drop_last) or [`Remainder::Drop`]. A loader with [`Remainder::Uneven`], for
/// evaluation, has no micro-batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoaderOptions {
    /// The number of samples that a batch has, on each rank. Default: 1.
    pub batch_size: usize,
    /// Leave out a last batch that would be smaller than the others. Default: false.
    pub drop_last: bool,
    /// The number of threads that read samples and make batches ahead of training. Default: 0; the thread that asks for a batch
    /// makes it.
    pub num_workers: usize,
    /// How many batches for each worker are begun before they are asked for. Default: 2. Without workers it has no effect.
    pub prefetch_factor: usize,
    /// How long the program waits for one batch of the workers, at most: PyTorch's `timeout`. Then it gets
    /// [`Error::LoaderTimedOut`], which names the worker and the sample, and before that at least one warning. Default: None,
    /// the group's time-out, as for zero; a loader without a group ([`from_sampler`](super::DataLoader::from_sampler)) waits for
    /// ever, and only warns. Without workers the program's own thread reads, and nothing can end its wait: there it is a warning.
    pub timeout: Option<Duration>,
    /// Which samples each rank gets, and in which order. Default: shuffled anew in each epoch, and padded so that every rank
    /// gets the same number.
    pub sampler: SamplerOptions,
}

impl Default for LoaderOptions {
    fn default() -> Self {
        Self {
            batch_size: 1,
            drop_last: false,
            num_workers: 0,
            prefetch_factor: 2,
            timeout: None,
            sampler: SamplerOptions::default(),
        }
    }
}

impl LoaderOptions {
    pub(super) fn check(&self) -> Result<()> {
        if self.batch_size == 0 {
            return Err(Error::invalid("batch_size", "it must be at least 1, not 0"));
        }
        if self.num_workers > 0 && self.prefetch_factor == 0 {
            let reason = "workers need at least one batch each to work on; for no read-ahead, set num_workers to 0";
            return Err(Error::invalid("prefetch_factor", reason));
        }
        if self.num_workers.checked_mul(self.prefetch_factor).is_none() {
            return Err(Error::invalid("prefetch_factor", "num_workers × prefetch_factor overflows usize"));
        }
        Ok(())
    }

    /// The options with the time-out of `group` if they have none.
    pub(super) fn of_group(self, group: &dyn LoaderGroup) -> Self {
        Self { timeout: Some(self.longest_wait().unwrap_or_else(|| group.timeout())), ..self }
    }

    /// The time-out, if there is one.
    pub(super) fn longest_wait(&self) -> Option<Duration> {
        self.timeout.filter(|timeout| !timeout.is_zero())
    }

    /// The number of batches that an order of `len` indices makes.
    pub(super) fn num_batches(&self, len: usize) -> usize {
        if self.drop_last { len / self.batch_size } else { len.div_ceil(self.batch_size) }
    }
}
