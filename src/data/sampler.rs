//! Which indices of a dataset belong to which rank: PyTorch's `DistributedSampler`, index for index.
use super::randperm::{Permutation, randperm};
use crate::virtual_ranks::VirtualRanks;
use crate::{Error, Result};

/// How a [`DistributedSampler`] deals the dataset out. The defaults are PyTorch's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SamplerOptions {
    /// Permute the dataset anew in each epoch. Default: true.
    pub shuffle: bool,
    /// The seed of the permutation, the same on all ranks; the epoch is added to it. Default: 0.
    ///
    /// As in PyTorch, only the low 32 bits of the sum count. The sum wraps, so that a negative seed of PyTorch's can be
    /// given as `seed as u64`.
    pub seed: u64,
    /// What to do if the ranks cannot all get the same number of samples. Default: [`Remainder::Pad`].
    pub remainder: Remainder,
}

impl Default for SamplerOptions {
    fn default() -> Self {
        Self { shuffle: true, seed: 0, remainder: Remainder::default() }
    }
}

/// What a [`DistributedSampler`] does if the length of the dataset is not a multiple of the number of ranks.
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
    /// [`DistributedDataParallel::backward`](crate::DistributedDataParallel::backward), may happen once per batch.
    Uneven,
}

/// Deals the indices of a dataset out to the ranks: together they get every index, and each rank gets the same number.
/// [`SamplerOptions::remainder`] says what happens if the dataset cannot be split evenly.
///
/// The indices are those of PyTorch's `torch.utils.data.DistributedSampler`, bit for bit: the dataset in the order of
/// [`randperm`](super::randperm)`(len, seed + epoch)`, padded from its own head or cut, and every `world_size`-th of it
/// from `rank` on. Unlike PyTorch's, the sampler is an error if no rank would get a sample.
///
/// ```
/// use candle_ddp::data::{DistributedSampler, SamplerOptions};
///
/// let mut sampler = DistributedSampler::new(10, 1, 4, SamplerOptions { shuffle: false, ..Default::default() })?;
/// assert_eq!(sampler.iter().collect::<Vec<_>>(), [1, 5, 9]);
/// sampler.set_epoch(1); // another order in each epoch, where the sampler shuffles
/// # Ok::<(), candle_ddp::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct DistributedSampler {
    dataset_len: usize,
    world_size: usize,
    rank: usize,
    options: SamplerOptions,
    epoch: u64,
    /// Under virtual ranks, which `world_size` and `rank` are then about, those that this rank computes from `rank` on.
    block: Option<Block>,
}

/// Micro-batches in the order in which a rank computes them: in each step, one of each of its virtual ranks.
#[derive(Debug, Clone, Copy)]
struct Block {
    virtual_ranks: usize,
    /// The samples of a micro-batch.
    batch_size: usize,
    /// Whether a last global batch that would not be full is left out; otherwise it is filled from the epoch's head.
    drop_last: bool,
}

impl DistributedSampler {
    /// The sampler of rank `rank` of `world_size` over a dataset of `len` samples.
    ///
    /// # Errors
    /// [`Error::RankOutOfRange`]; [`Error::InvalidArgument`] if `world_size` or `len` is 0, or if [`Remainder::Drop`] drops
    /// the whole dataset.
    pub fn new(len: usize, rank: usize, world_size: usize, options: SamplerOptions) -> Result<Self> {
        if world_size == 0 {
            return Err(Error::invalid("world_size", "it must be at least 1, not 0"));
        }
        if rank >= world_size {
            return Err(Error::RankOutOfRange { rank, world_size });
        }
        if len == 0 {
            let reason = "the dataset must not be empty: was it read from the right place?";
            return Err(Error::invalid("len", reason));
        }
        if options.remainder == Remainder::Drop && len < world_size {
            let reason = format!(
                "Remainder::Drop would drop the whole dataset, which has {len} sample(s) for {world_size} ranks: choose another \
                 remainder, or use fewer ranks"
            );
            return Err(Error::invalid("remainder", reason));
        }
        let padded = options.remainder == Remainder::Pad;
        if padded && len.div_ceil(world_size).checked_mul(world_size).is_none() {
            return Err(Error::invalid(
                "len",
                format!(
                    "{len} samples cannot be padded to a multiple of {world_size} ranks: the total overflows usize"
                ),
            ));
        }
        Ok(Self { dataset_len: len, world_size, rank, options, epoch: 0, block: None })
    }

    /// The sampler of the micro-batches `own` of `ranks`, with `batch_size` samples each: as if each were a rank. Every global
    /// batch is full.
    pub(super) fn of_virtual_ranks(
        len: usize,
        ranks: &VirtualRanks,
        batch_size: usize,
        drop_last: bool,
        options: SamplerOptions,
    ) -> Result<Self> {
        let own = ranks.own();
        let sampler = Self::new(len, own.start, ranks.count(), options)?;
        if options.remainder == Remainder::Uneven {
            let reason =
                "with virtual_ranks, it must be Remainder::Pad or Drop: all micro-batches have as many samples";
            return Err(Error::invalid("remainder", reason));
        }
        let global = ranks.count().checked_mul(batch_size).filter(|global| len.checked_add(*global).is_some());
        if global.is_none() {
            let reason = format!("virtual_ranks × batch_size, {} × {batch_size}, is too large", ranks.count());
            return Err(Error::invalid("batch_size", reason));
        }
        let drop_last = drop_last || options.remainder == Remainder::Drop;
        Ok(Self { block: Some(Block { virtual_ranks: own.len(), batch_size, drop_last }), ..sampler })
    }

    /// How many batches this rank has in a step.
    pub(super) fn batches_per_step(&self) -> usize {
        self.block.map_or(1, |block| block.virtual_ranks)
    }

    /// Chooses the permutation of the next [`iter`](Self::iter): `seed + epoch`. Call it before each epoch, with the
    /// same number on all ranks; without it every epoch has the same order. It has no effect without `shuffle`.
    pub fn set_epoch(&mut self, epoch: u64) {
        self.epoch = epoch;
    }

    /// How many indices this rank gets (PyTorch's `num_samples`): the dataset's length over the number of ranks,
    /// rounded up, or down with [`Remainder::Drop`]. With [`Remainder::Uneven`], it is rounded up on the first ranks and down
    /// on the others.
    pub fn len(&self) -> usize {
        self.len_after(0)
    }

    /// Whether this rank gets nothing.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many indices all ranks get together, padding included (PyTorch's `total_size`).
    pub fn total_size(&self) -> usize {
        if self.block.is_some() {
            return self.most_after(0) * self.world_size;
        }
        match self.options.remainder {
            Remainder::Drop => self.dataset_len / self.world_size * self.world_size,
            Remainder::Pad => self.dataset_len.div_ceil(self.world_size) * self.world_size,
            Remainder::Uneven => self.dataset_len,
        }
    }

    /// This rank's indices in this epoch.
    ///
    /// The iterator owns the permutation, 4 bytes per sample of the dataset (8 from 2³² samples on), and is all that
    /// grows with the dataset; without `shuffle` nothing does.
    pub fn iter(&self) -> SamplerIter {
        self.iter_after(0)
    }

    /// This rank's remaining indices, once all ranks together have consumed the first `consumed` samples of the epoch. The
    /// number of ranks may have changed since. They are dealt out as a whole epoch is: `iter_after(0)` is
    /// [`iter`](Self::iter).
    ///
    /// Since ranks consume an order from its beginning, and the order does not depend on their number, this continues
    /// exactly where a run stopped, also with another `world_size`: the ranks get every sample that was left, once, and
    /// fewer than `world_size` of them are padding or dropped.
    pub fn iter_after(&self, consumed: usize) -> SamplerIter {
        let remaining = self.len_after(consumed);
        let shuffle = self.options.shuffle && remaining > 0;
        SamplerIter {
            permutation: shuffle.then(|| randperm(self.dataset_len, self.options.seed.wrapping_add(self.epoch))),
            dataset_len: self.dataset_len,
            world_size: self.world_size,
            next: consumed.saturating_add(self.rank),
            remaining,
            block: self.block,
            taken: 0,
        }
    }

    /// How many indices this rank gets after all ranks have consumed `consumed`.
    pub(super) fn len_after(&self, consumed: usize) -> usize {
        self.rank_len_after(self.rank, consumed).saturating_mul(self.batches_per_step())
    }

    /// How many indices rank 0, or each virtual rank, gets after all ranks have consumed `consumed`; no other rank gets more.
    pub(super) fn most_after(&self, consumed: usize) -> usize {
        self.rank_len_after(0, consumed)
    }

    fn rank_len_after(&self, rank: usize, consumed: usize) -> usize {
        let left = self.dataset_len.saturating_sub(consumed);
        if let Some(Block { batch_size, drop_last, .. }) = self.block {
            let global = batch_size * self.world_size;
            return batch_size * if drop_last { left / global } else { left.div_ceil(global) };
        }
        match self.options.remainder {
            Remainder::Drop => left / self.world_size,
            Remainder::Pad => left.div_ceil(self.world_size),
            Remainder::Uneven => left.saturating_sub(rank).div_ceil(self.world_size),
        }
    }

    /// How many samples the dataset has.
    pub fn dataset_len(&self) -> usize {
        self.dataset_len
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// The rank that the indices are for.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The seed of the options, or of the checkpoint that a loader has resumed from.
    pub fn seed(&self) -> u64 {
        self.options.seed
    }

    /// The epoch that [`set_epoch`](Self::set_epoch) chose; 0 at first.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    pub(super) fn set_seed(&mut self, seed: u64) {
        self.options.seed = seed;
    }
}

impl IntoIterator for &DistributedSampler {
    type Item = usize;
    type IntoIter = SamplerIter;

    fn into_iter(self) -> SamplerIter {
        self.iter()
    }
}

/// The indices of one rank in one epoch: see [`DistributedSampler::iter`].
#[derive(Debug, Clone)]
pub struct SamplerIter {
    permutation: Option<Permutation>,
    dataset_len: usize,
    world_size: usize,
    /// The next position in the padded list of all ranks' indices.
    next: usize,
    remaining: usize,
    block: Option<Block>,
    /// How many it has returned.
    taken: usize,
}

impl SamplerIter {
    /// Moves to the next position.
    fn advance(&mut self) {
        self.next = self.next.saturating_add(self.world_size);
        self.taken += 1;
        let Some(Block { virtual_ranks, batch_size, .. }) = self.block else { return };
        if self.taken.is_multiple_of(batch_size) {
            // The micro-batch of the next virtual rank begins beside this one; after the last one, the next step begins.
            let is_last = self.taken.is_multiple_of(batch_size * virtual_ranks);
            let next =
                if is_last { self.next + 1 - virtual_ranks } else { self.next + 1 - batch_size * self.world_size };
            self.next = next;
        }
    }
}

impl Iterator for SamplerIter {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        self.remaining = self.remaining.checked_sub(1)?;
        // Padding repeats the list from its head, cyclically. There are samples remaining only if there is a dataset.
        let position = self.next % self.dataset_len;
        self.advance();
        match &self.permutation {
            Some(permutation) => permutation.get(position),
            None => Some(position),
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.remaining, Some(self.remaining))
    }
}

impl ExactSizeIterator for SamplerIter {}
impl std::iter::FusedIterator for SamplerIter {}
