//! From an order of indices to batches.
use crate::{Error, Result};

/// How a [`DataLoader`] or a [`StatefulDataLoader`](super::StatefulDataLoader) makes batches. The defaults are those of
/// PyTorch's `DataLoader`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoaderOptions {
    /// How many samples a batch has, on each rank. Default: 1.
    pub batch_size: usize,
    /// Leave out a last batch that would be smaller than the others. Default: false.
    pub drop_last: bool,
    /// How many threads read samples and make batches ahead of training. Default: 0, all is done by the thread that asks
    /// for a batch. Only a [`StatefulDataLoader`](super::StatefulDataLoader) has workers.
    pub num_workers: usize,
    /// How many batches for each worker are begun before they are asked for. Default: 2. Without workers it has no effect.
    pub prefetch_factor: usize,
}

impl Default for LoaderOptions {
    fn default() -> Self {
        Self { batch_size: 1, drop_last: false, num_workers: 0, prefetch_factor: 2 }
    }
}

impl LoaderOptions {
    pub(super) fn check(&self) -> Result<()> {
        if self.batch_size == 0 {
            return Err(Error::invalid("batch_size", "a batch needs at least one sample"));
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

    /// Why `samples`, which are at least one, make no batch.
    pub(super) fn no_batch(&self, samples: usize) -> Error {
        let batch_size = self.batch_size;
        let reason = format!(
            "there are {samples} samples for this rank, and drop_last leaves out what is less than a batch of {batch_size}, so \
             that there is no batch at all: make batch_size {samples} or less, set drop_last to false, or use fewer ranks"
        );
        Error::invalid("batch_size", reason)
    }

    /// How many batches an order of `len` indices makes.
    pub(super) fn num_batches(&self, len: usize) -> usize {
        if self.drop_last { len / self.batch_size } else { len.div_ceil(self.batch_size) }
    }

    /// Takes the indices of the next batch out of `order`. Returns whether there was a batch.
    pub(super) fn cut(&self, order: &mut impl Iterator<Item = usize>, indices: &mut Vec<usize>) -> bool {
        indices.clear();
        indices.extend(order.take(self.batch_size));
        if self.drop_last { indices.len() == self.batch_size } else { !indices.is_empty() }
    }
}

/// Turns indices into batches: cuts an order of indices into runs of `batch_size` and has `collate` make a batch of
/// each, usually a pair of tensors.
///
/// The order is whatever iterates over indices: a [`DistributedSampler`](super::DistributedSampler), a range, a list.
/// Every rank of a sampler gets the same number of indices, so every rank gets the same number of batches.
///
/// A batch is made when it is asked for, on the thread that asks; nothing is read ahead. On a GPU this keeps all work
/// of a rank on one thread, and so on one stream. A [`StatefulDataLoader`](super::StatefulDataLoader) has worker threads,
/// and a state that can be saved.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_ddp::data::{DataLoader, DistributedSampler, LoaderOptions, SamplerOptions};
///
/// let samples = Tensor::arange(0f32, 10., &Device::Cpu)?;
/// let loader = DataLoader::new(LoaderOptions { batch_size: 2, ..Default::default() }, |indices| {
///     let indices: Vec<u32> = indices.iter().map(|&index| index as u32).collect();
///     Ok(samples.index_select(&Tensor::new(indices, &Device::Cpu)?, 0)?)
/// })?;
/// let sampler = DistributedSampler::new(10, 2, 0, SamplerOptions { shuffle: false, ..Default::default() })?;
/// let batches = loader.iter(&sampler).map(|batch| batch?.to_vec1::<f32>()).collect::<Result<Vec<_>, _>>()?;
/// assert_eq!(batches, [vec![0., 2.], vec![4., 6.], vec![8.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone)]
pub struct DataLoader<F> {
    options: LoaderOptions,
    collate: F,
}

impl<T, F: Fn(&[usize]) -> Result<T>> DataLoader<F> {
    /// A loader that makes each batch with `collate`. Fails where `batch_size` is 0 or `num_workers` is not 0.
    pub fn new(options: LoaderOptions, collate: F) -> Result<Self> {
        options.check()?;
        if options.num_workers != 0 {
            let reason = "a DataLoader makes batches on the thread that asks for them, without workers; a \
                          StatefulDataLoader reads a Dataset with workers";
            return Err(Error::invalid("num_workers", reason));
        }
        Ok(Self { options, collate })
    }

    /// The batches of `order`, one after the other. An error of `collate` takes the place of its batch; the batches
    /// after it can still be read. An order that has indices, but too few for a batch with
    /// [`drop_last`](LoaderOptions::drop_last), gives [`Error::InvalidArgument`] instead of a batch: training on nothing would
    /// end well.
    pub fn iter<I: IntoIterator<Item = usize>>(&self, order: I) -> Batches<'_, I::IntoIter, F> {
        Batches { loader: self, order: order.into_iter(), indices: Vec::new(), is_first: true }
    }

    /// How many batches an order of `len` indices makes.
    pub fn num_batches(&self, len: usize) -> usize {
        self.options.num_batches(len)
    }
}

/// The batches of one order: see [`DataLoader::iter`].
pub struct Batches<'a, I, F> {
    loader: &'a DataLoader<F>,
    order: I,
    /// The indices of the current batch, kept for its memory.
    indices: Vec<usize>,
    /// There has been no batch yet.
    is_first: bool,
}

impl<I, F> Batches<'_, I, F> {
    /// How many items `len` more indices make: batches, or the error of an order that makes none.
    fn items(&self, len: usize) -> usize {
        let batches = self.loader.options.num_batches(len);
        if self.is_first { batches.max(len.min(1)) } else { batches }
    }
}

impl<T, I: Iterator<Item = usize>, F: Fn(&[usize]) -> Result<T>> Iterator for Batches<'_, I, F> {
    type Item = Result<T>;

    fn next(&mut self) -> Option<Result<T>> {
        let DataLoader { options, collate } = self.loader;
        let is_first = std::mem::replace(&mut self.is_first, false);
        match options.cut(&mut self.order, &mut self.indices) {
            true => Some(collate(&self.indices)),
            false if is_first && !self.indices.is_empty() => Some(Err(options.no_batch(self.indices.len()))),
            false => None,
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let (lower, upper) = self.order.size_hint();
        (self.items(lower), upper.map(|upper| self.items(upper)))
    }
}

impl<T, I: ExactSizeIterator<Item = usize>, F: Fn(&[usize]) -> Result<T>> ExactSizeIterator for Batches<'_, I, F> {}
