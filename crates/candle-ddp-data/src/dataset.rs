//! Samples by index.
use candle_ddp_state::Result;
use candle_ddp_state::seed::Generator;

/// Samples that are read by index, such as a folder of images: a map-style dataset of PyTorch's.
///
/// Worker threads share a dataset and read it at the same time.
pub trait Dataset: Send + Sync {
    /// One sample, such as an image and its label.
    type Sample: Send;

    /// The number of samples.
    fn len(&self) -> usize;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The sample `index`, which is below [`len`](Self::len). Random augmentation draws its numbers from `random`, which
    /// [`Generator::for_sample`] has made for this sample: whichever worker reads it, the numbers are the same.
    ///
    /// # Errors
    /// Whatever keeps the sample from being read. The data loader adds the index.
    fn get(&self, index: usize, random: &mut Generator) -> Result<Self::Sample>;
}

impl<D: Dataset + ?Sized> Dataset for std::sync::Arc<D> {
    type Sample = D::Sample;

    fn len(&self) -> usize {
        (**self).len()
    }

    fn get(&self, index: usize, random: &mut Generator) -> Result<Self::Sample> {
        (**self).get(index, random)
    }
}

/// The indices themselves, for a collate function that finds the samples of a whole batch at once.
impl Dataset for std::ops::Range<usize> {
    type Sample = usize;

    fn len(&self) -> usize {
        ExactSizeIterator::len(self)
    }

    fn get(&self, index: usize, _: &mut Generator) -> Result<usize> {
        Ok(self.start + index)
    }
}
