//! How samples are read and batches are made, whichever thread does it.
use super::Dataset;
use candle_ddp_base::panic::panic_message;
use candle_ddp_state::seed::Generator;
use candle_ddp_state::{Error, Result};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Makes the batches of one epoch. Panics of the program's code come out as errors.
pub(super) struct Recipe<D, F> {
    pub(super) dataset: Arc<D>,
    pub(super) collate: F,
    pub(super) seed: u64,
    pub(super) epoch: u64,
    pub(super) rank: usize,
}

impl<D: Dataset, T, F: Fn(Vec<D::Sample>) -> Result<T>> Recipe<D, F> {
    pub(super) fn read(&self, index: usize) -> Result<D::Sample> {
        let mut random = Generator::for_sample(self.seed, self.epoch, index, self.rank);
        caught(|| self.dataset.get(index, &mut random))
            .map_err(|reason| Error::Samples { indices: vec![index], reason })
    }

    /// Makes a batch of the samples `indices`. Of several that could not be read, the first one's error is returned.
    pub(super) fn collate(&self, indices: &[usize], samples: Vec<Result<D::Sample>>) -> Result<T> {
        let collated = caught(|| match samples.into_iter().collect::<Result<Vec<_>>>() {
            Ok(samples) => (self.collate)(samples).map(Ok),
            Err(unread) => Ok(Err(unread)),
        });
        collated.map_err(|reason| Error::Samples { indices: indices.to_vec(), reason })?
    }
}

/// The result of `work`, or what its error or its panic said.
fn caught<T>(work: impl FnOnce() -> Result<T>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(panic) => Err(panic_message(&*panic)),
    }
}
