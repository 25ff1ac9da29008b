//! Micro-batches with their numbers, for virtual ranks.
use super::{LoaderIter, LoaderState};
use candle_ddp_base::panic::lock;
use candle_ddp_state::Result;
use candle_ddp_state::seed::Generator;
use candle_ddp_tensor::seed::forget_draws;
use std::ops::Range;
use std::sync::Mutex;

/// A part of a global batch, as one virtual rank computes it: see [`DataLoader::micro_batches`](super::DataLoader::micro_batches).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct MicroBatch<T> {
    /// Its number in the global batch, from 0 to `virtual_ranks - 1`.
    pub number: usize,
    /// Whether it is this rank's last one of the global batch, whose gradients are for the optimizer's step.
    pub is_last: bool,
    /// The position before the global batch, from which its random numbers follow.
    pub start: LoaderState,
    /// The samples.
    pub batch: T,
}

impl<T> MicroBatch<T> {
    /// The generator for dropout and all else that draws random numbers in this micro-batch's forward pass. It follows from
    /// the loader's seed, the epoch, the place of the global batch in it and the number, and not from the rank.
    pub fn generator(&self) -> Generator {
        let LoaderState { seed, epoch, consumed, .. } = self.start;
        Generator::for_micro_batch(seed, epoch, consumed, self.number)
    }

    /// Makes layers that draw from `generator` draw the random numbers of this micro-batch. A model with dropout needs it
    /// before each forward pass: `micro_batch.seed(&default_generator())` for layers of `Dropout::new`. Without
    /// it, the backward pass is an error.
    pub fn seed(&self, generator: &Mutex<Generator>) {
        *lock(generator) = self.generator();
    }
}

/// The remaining micro-batches of an epoch.
pub(super) struct MicroBatches<T> {
    batches: LoaderIter<T>,
    /// The numbers of this rank's in a global batch.
    own: Range<usize>,
    seed: u64,
    dataset_len: usize,
}

impl<T> MicroBatches<T> {
    pub(super) fn new(batches: LoaderIter<T>, own: Range<usize>, seed: u64, dataset_len: usize) -> Self {
        Self { batches, own, seed, dataset_len }
    }
}

impl<T> Iterator for MicroBatches<T> {
    type Item = Result<MicroBatch<T>>;

    fn next(&mut self) -> Option<Self::Item> {
        let number = self.own.start + self.batches.place();
        let start = self.batches.step(self.seed, self.dataset_len);
        let batch = self.batches.next()?;
        // What was drawn before, as in an evaluation, does not belong to it.
        forget_draws();
        let is_last = number + 1 == self.own.end;
        Some(batch.map(|batch| MicroBatch { number, is_last, start, batch }))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.batches.size_hint()
    }
}

impl<T> ExactSizeIterator for MicroBatches<T> {}
