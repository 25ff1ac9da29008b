//! The batches of an epoch, and how far the program has come in them.
use super::recipe::Recipe;
use super::{Dataset, DistributedSampler, LoaderOptions, SamplerIter};
use crate::panic::lock;
use crate::{Error, Result};
use std::fmt;
use std::sync::{Arc, Mutex};

/// Where a loader is.
#[derive(Clone, Copy)]
pub(super) struct Position {
    pub(super) epoch: u64,
    /// How many samples of the epoch all ranks have consumed together, without padding.
    pub(super) consumed: usize,
    /// The next iterator begins there, and not at the beginning of the epoch.
    pub(super) resume: bool,
}

/// Batches.
pub(super) type Source<T> = Box<dyn Iterator<Item = Result<T>>>;

/// The remaining batches of an epoch: see [`DataLoader::iter`](super::DataLoader::iter). It does not borrow the loader, so a
/// checkpoint in the middle of an epoch can have the loader as a part.
pub struct LoaderIter<T> {
    /// None when there are no more.
    batches: Option<Source<T>>,
    /// Why there are none.
    failure: Option<Error>,
    /// How many batches there are still.
    remaining: usize,
    /// Where the loader is after the batch that was delivered last.
    here: Position,
    batch_size: usize,
    /// How many batches this rank has in a step: its micro-batches, or one.
    per_step: usize,
    /// How many of them it has delivered in this step.
    delivered: usize,
    /// How many samples a rank, or a virtual rank, has left, at most.
    most: usize,
    dataset_len: usize,
    world_size: usize,
    /// Where the loader keeps it.
    position: Arc<Mutex<Position>>,
}

impl<T> LoaderIter<T> {
    pub(super) fn new(
        batches: Result<Source<T>>,
        options: LoaderOptions,
        sampler: &DistributedSampler,
        start: Position,
        position: Arc<Mutex<Position>>,
    ) -> Self {
        let (batches, failure, remaining) = match batches {
            Ok(batches) => (Some(batches), None, options.num_batches(sampler.len_after(start.consumed))),
            Err(failure) => (None, Some(failure), 1),
        };
        let here = Position { resume: false, ..start };
        let (dataset_len, world_size) = (sampler.dataset_len(), sampler.world_size());
        let (batch_size, most) = (options.batch_size, sampler.most_after(start.consumed));
        let (per_step, delivered) = (sampler.batches_per_step(), 0);
        Self {
            batches,
            failure,
            remaining,
            here,
            batch_size,
            per_step,
            delivered,
            most,
            dataset_len,
            world_size,
            position,
        }
    }
}

impl<T> LoaderIter<T> {
    /// Where the loader was before the step of the next batch: the epoch, and the samples consumed in it.
    pub(super) fn step(&self) -> (u64, usize) {
        (self.here.epoch, self.here.consumed)
    }

    /// The place of the next batch in its step.
    pub(super) fn place(&self) -> usize {
        self.delivered
    }
}

impl<T> Iterator for LoaderIter<T> {
    type Item = Result<T>;

    fn next(&mut self) -> Option<Result<T>> {
        if let Some(failure) = self.failure.take() {
            self.remaining = 0;
            return Some(Err(failure));
        }
        match self.batches.as_mut()?.next() {
            Some(batch) => {
                self.remaining -= 1;
                self.delivered = (self.delivered + 1) % self.per_step;
                if self.delivered > 0 {
                    return Some(batch);
                }
                // All ranks have consumed as many batches, and together the next part of the order: of it, those that have
                // one sample more than others tell how long it is.
                let samples = self.batch_size.min(self.most);
                self.most -= samples;
                let consumed = self.here.consumed.saturating_add(samples.saturating_mul(self.world_size));
                self.here.consumed = consumed.min(self.dataset_len);
                *lock(&self.position) = self.here;
                Some(batch)
            }
            None => {
                self.batches = None;
                *lock(&self.position) = Position { epoch: self.here.epoch + 1, consumed: 0, resume: false };
                None
            }
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.remaining, Some(self.remaining))
    }
}

impl<T> fmt::Debug for LoaderIter<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoaderIter")
            .field("epoch", &self.here.epoch)
            .field("consumed", &self.here.consumed)
            .field("remaining", &self.remaining)
            .finish_non_exhaustive()
    }
}

impl<T> ExactSizeIterator for LoaderIter<T> {}
impl<T> std::iter::FusedIterator for LoaderIter<T> {}

/// Makes a batch when it is asked for, on the thread that asks.
pub(super) struct Inline<D, F> {
    recipe: Recipe<D, F>,
    order: SamplerIter,
    options: LoaderOptions,
    /// The indices of the current batch, kept for its memory.
    indices: Vec<usize>,
}

impl<D, F> Inline<D, F> {
    pub(super) fn new(recipe: Recipe<D, F>, order: SamplerIter, options: LoaderOptions) -> Self {
        Self { recipe, order, options, indices: Vec::new() }
    }
}

impl<D: Dataset, T, F: Fn(Vec<D::Sample>) -> Result<T>> Iterator for Inline<D, F> {
    type Item = Result<T>;

    fn next(&mut self) -> Option<Result<T>> {
        if !self.options.cut(&mut self.order, &mut self.indices) {
            return None;
        }
        let samples = self.indices.iter().map(|index| self.recipe.read(*index)).collect();
        Some(self.recipe.collate(&self.indices, samples))
    }
}
