//! Which indices of a dataset belong to which rank: PyTorch's `DistributedSampler`, index for index.
use super::deal::Deal;
use super::indices::Indices;
use super::randperm::permutation;
use super::{EpochOrder, Order, Remainder, SamplerOptions};
use candle_ddp_state::{Error, Result};

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
/// # fn main() -> candle_ddp::Result<()> {
/// let indices = candle_ddp::spawn(4, |pg| {
///     let options = SamplerOptions { shuffle: false, ..Default::default() };
///     let mut sampler = DistributedSampler::new(10, pg.rank(), pg.world_size(), options)?;
///     sampler.set_epoch(1); // another order in each epoch, where the sampler shuffles
///     Ok(sampler.iter().collect::<Vec<_>>())
/// })?;
/// assert_eq!(indices[1], [1, 5, 9]); // rank 1's
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct DistributedSampler {
    dataset_len: usize,
    deal: Deal,
    options: SamplerOptions,
    epoch: u64,
}

impl DistributedSampler {
    /// The sampler of rank `rank` of `world_size` over a dataset of `len` samples.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `rank` is not below `world_size`, `len` is 0, or [`Remainder::Drop`] drops the whole dataset.
    pub fn new(len: usize, rank: usize, world_size: usize, options: SamplerOptions) -> Result<Self> {
        Self::of(len, Deal::new(rank, world_size, options.remainder)?, options)
    }

    /// The sampler of a dataset of `len` samples that `deal` deals out.
    pub(super) fn of(len: usize, deal: Deal, options: SamplerOptions) -> Result<Self> {
        if len == 0 {
            let reason = "the dataset must not be empty: was it read from the right place?";
            return Err(Error::invalid("len", reason));
        }
        deal.check(len, "dataset", "sample(s)")?;
        Ok(Self { dataset_len: len, deal, options, epoch: 0 })
    }

    /// Chooses the permutation of the next [`iter`](Self::iter): `seed + epoch`. Call it before each epoch, with the
    /// same number on all ranks; without it every epoch has the same order. It has no effect without `shuffle`.
    pub fn set_epoch(&mut self, epoch: u64) {
        self.epoch = epoch;
    }

    /// The number of indices that this rank gets (PyTorch's `num_samples`): the dataset's length over the number of ranks,
    /// rounded up, or down with [`Remainder::Drop`]. With [`Remainder::Uneven`], it is rounded up on the first ranks and down
    /// on the others.
    pub fn len(&self) -> usize {
        self.deal.len_after(self.dataset_len, 0)
    }

    /// Whether this rank gets nothing.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number of indices that all ranks get together, padding included (PyTorch's `total_size`).
    pub fn total_size(&self) -> usize {
        let world_size = self.world_size();
        match self.options.remainder {
            Remainder::Drop => self.dataset_len / world_size * world_size,
            Remainder::Pad => self.dataset_len.div_ceil(world_size) * world_size,
            Remainder::Uneven => self.dataset_len,
        }
    }

    /// This rank's indices in this epoch.
    ///
    /// The iterator owns the permutation, 4 bytes per sample of the dataset (8 from 2³² samples on), and is all that
    /// grows with the dataset; without `shuffle` nothing does.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = usize> + Clone + use<> {
        self.iter_after(0)
    }

    /// This rank's remaining indices, once all ranks together have consumed the first `consumed` samples of the epoch. The
    /// number of ranks may have changed since. They are dealt out as a whole epoch is: `iter_after(0)` is
    /// [`iter`](Self::iter).
    ///
    /// Since ranks consume an order from its beginning, and the order does not depend on their number, this continues
    /// exactly where a run stopped, also with another `world_size`: the ranks get every sample that was left, once, and
    /// fewer than `world_size` of them are padding or dropped.
    pub fn iter_after(&self, consumed: usize) -> impl ExactSizeIterator<Item = usize> + Clone + use<> {
        let places = self.deal.places_after(self.dataset_len, consumed);
        // Nothing is drawn for nobody.
        let shuffle = self.options.shuffle && places.len() > 0;
        let indices =
            if shuffle { self.permutation(self.seed(), self.epoch) } else { Indices::InOrder(self.dataset_len) };
        indices.at_places(places)
    }

    fn permutation(&self, seed: u64, epoch: u64) -> Indices {
        permutation(self.dataset_len, seed.wrapping_add(epoch))
    }

    /// The number of samples that the dataset has.
    pub(super) fn dataset_len(&self) -> usize {
        self.dataset_len
    }

    /// The number of ranks.
    pub(super) fn world_size(&self) -> usize {
        self.deal.world_size
    }

    /// The seed of the options, or of the checkpoint that a loader has resumed from.
    pub(super) fn seed(&self) -> u64 {
        self.options.seed
    }

    /// The epoch that [`set_epoch`](Self::set_epoch) chose; 0 at first.
    pub(super) fn epoch(&self) -> u64 {
        self.epoch
    }

    pub(super) fn deal(&self) -> Deal {
        self.deal
    }
}

/// The order that all ranks' samplers deal out. It does not depend on the sampler's rank, its number of ranks or its own seed and
/// epoch.
impl Order for DistributedSampler {
    fn dataset_len(&self) -> usize {
        self.dataset_len
    }

    fn epoch_order(&self, seed: u64, epoch: u64) -> Result<EpochOrder> {
        Ok(EpochOrder::new(match self.options.shuffle {
            true => self.permutation(seed, epoch),
            false => Indices::InOrder(self.dataset_len),
        }))
    }
}
