//! The batches of an epoch, and how far the program has come in them.
use super::deal::Deal;
use super::late::{Patience, Watch};
use super::order::Batches;
use super::origin;
use super::recipe::Recipe;
use super::{Dataset, EpochOrder, LoaderOptions, LoaderState};
use candle_ddp_base::activity::during;
use candle_ddp_base::debug_fields;
use candle_ddp_base::panic::lock;
use candle_ddp_base::warnings::warn_aloud;
use candle_ddp_state::{Error, Result};
use std::sync::{Arc, Mutex, Once};

/// The loader's position.
#[derive(Clone)]
pub(super) struct Position {
    pub(super) epoch: u64,
    /// How many samples of the epoch all ranks have consumed together, without padding.
    pub(super) consumed: usize,
    /// The next iterator begins there, and not at the beginning of the epoch.
    pub(super) resume: bool,
    /// The last batch of the epoch has been delivered: the next iterator begins the next epoch.
    pub(super) ended: bool,
    /// The program has named the epoch although the loader was in it, and may mean to read it again.
    pub(super) chosen: bool,
    /// How often the epoch was begun again in its middle.
    restarts: usize,
    /// How often the loader has got a state.
    pub(super) resumes: usize,
    /// The epoch's order, if it was made.
    pub(super) order: Option<Arc<EpochOrder>>,
}

impl Position {
    /// The beginning of an epoch.
    pub(super) fn begin(epoch: u64) -> Self {
        Self { epoch, consumed: 0, resume: false, ended: false, chosen: false, restarts: 0, resumes: 0, order: None }
    }

    /// Moves to the beginning of an epoch.
    pub(super) fn enter(&mut self, epoch: u64) {
        *self = Self { resumes: self.resumes, ..Self::begin(epoch) };
    }

    /// Where a run was stopped, in a loader that has got this many states before.
    pub(super) fn resumed(epoch: u64, consumed: usize, resumes: usize) -> Self {
        Self { consumed, resume: true, resumes: resumes + 1, ..Self::begin(epoch) }
    }

    pub(super) fn state(&self, seed: u64, dataset_len: usize) -> LoaderState {
        let order = self.order.as_ref().filter(|_| self.consumed > 0).map_or(0, |order| order.fingerprint());
        LoaderState { seed, epoch: self.epoch, consumed: self.consumed, dataset_len, order }
    }
}

/// Batches.
pub(super) type Source<T> = Box<dyn Iterator<Item = Result<T>>>;

/// The remaining batches of an epoch: see [`DataLoader::iter`](super::DataLoader::iter). It does not borrow the loader, so a
/// checkpoint in the middle of an epoch can have the loader as a part.
pub struct LoaderIter<T> {
    /// None when there are no more.
    batches: Option<Source<T>>,
    /// The reason why there are none.
    failure: Option<Error>,
    /// The number of remaining batches.
    remaining: usize,
    /// The samples of all batches, also of those that were delivered.
    order: Option<Batches>,
    progress: Progress,
    /// The loader's position after the batch that was delivered last.
    here: Position,
    /// The loader's own copy of it.
    position: Arc<Mutex<Position>>,
    /// Until the first batch: says once if the epoch was begun before. None on ranks other than rank 0.
    restart: Option<Arc<Once>>,
}

/// How far all ranks are in an order.
#[derive(Clone, Copy)]
pub(super) struct Progress {
    /// The number of places that all ranks have consumed together.
    consumed: usize,
    /// How many a rank, or a virtual rank, has left, at most.
    most: usize,
    batch_size: usize,
    world_size: usize,
    /// The number of batches that this rank has in a step: its micro-batches, or one.
    per_step: usize,
    /// The number of them that it has delivered in this step.
    delivered: usize,
    /// On rank 0, how many places at the end come a second time, so that all ranks have as many.
    padding: usize,
}

impl Progress {
    pub(super) fn new(order: &EpochOrder, consumed: usize, deal: &Deal, options: &LoaderOptions) -> Self {
        let most = deal.most_after(order.places(), consumed);
        let (per_step, padding) = (deal.batches_per_step(), deal.padding_after(order.places(), consumed, options));
        let (batch_size, world_size) = (options.batch_size, deal.world_size);
        Self { consumed, most, batch_size, world_size, per_step, delivered: 0, padding }
    }

    /// This rank has delivered another batch. Returns whether it was the last one of a step.
    ///
    /// Then all ranks have consumed as many batches, and together the next part of the order: its length follows from the ranks
    /// that have one place more.
    fn advance(&mut self, order: &EpochOrder) -> bool {
        self.delivered = (self.delivered + 1) % self.per_step;
        if self.delivered > 0 {
            return false;
        }
        let places = self.batch_size.min(self.most);
        self.most -= places;
        self.consumed = self.consumed.saturating_add(places.saturating_mul(self.world_size)).min(order.places());
        true
    }
}

impl<T> LoaderIter<T> {
    pub(super) fn new(
        batches: Source<T>,
        order: Batches,
        progress: Progress,
        start: Position,
        position: Arc<Mutex<Position>>,
        restart: Option<Arc<Once>>,
    ) -> Self {
        // After a resume, the iterator should begin in the middle.
        let restart = restart.filter(|_| start.consumed == 0 && !start.chosen);
        let here = Position { resume: false, ..start };
        let remaining = order.len();
        let order = Some(order);
        Self { batches: Some(batches), failure: None, remaining, order, progress, here, position, restart }
    }

    /// An error in place of the batches.
    pub(super) fn failed(failure: Error, start: Position, position: Arc<Mutex<Position>>) -> Self {
        let progress =
            Progress { consumed: 0, most: 0, batch_size: 0, world_size: 0, per_step: 1, delivered: 0, padding: 0 };
        let here = Position { resume: false, ..start };
        let (failure, remaining) = (Some(failure), 1);
        Self { batches: None, failure, remaining, order: None, progress, here, position, restart: None }
    }

    /// The batches, each with the indices of its samples in the dataset, such as for `metrics::gather_in_order`.
    /// [Padding](super::Remainder::Pad) has no index: if a batch has more samples than indices, those at its end are padding, and an
    /// evaluation must not count them.
    ///
    /// ```
    /// use candle_core::Tensor;
    /// use candle_ddp::data::{DataLoader, LoaderOptions, SamplerOptions, TensorDataset};
    /// use candle_ddp::metrics::gather_in_order;
    ///
    /// # fn main() -> candle_ddp::Result<()> {
    /// candle_ddp::spawn(2, |pg| {
    ///     let data = TensorDataset::new(Tensor::arange(0f32, 5., pg.device())?)?;
    ///     let sampler = SamplerOptions { shuffle: false, ..Default::default() };
    ///     let loader = DataLoader::new(data, &pg, LoaderOptions { batch_size: 2, sampler, ..Default::default() })?;
    ///     let (mut samples, mut rows) = (Vec::new(), Vec::new());
    ///     for batch in loader.iter().with_indices() {
    ///         let (indices, x) = batch?;
    ///         rows.push((x * 10.)?.narrow(0, 0, indices.len())?);
    ///         samples.extend(indices);
    ///     }
    ///     // Rank 1 has had sample 0 again.
    ///     assert_eq!(samples, if pg.rank() == 0 { vec![0, 2, 4] } else { vec![1, 3] });
    ///     let all = gather_in_order(&pg, &samples, &Tensor::cat(&rows, 0)?)?;
    ///     assert_eq!(all.to_vec1::<f32>()?, [0., 10., 20., 30., 40.]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The errors of the batches, as without indices.
    pub fn with_indices(mut self) -> impl ExactSizeIterator<Item = Result<(Vec<usize>, T)>> {
        // The program knows which samples are padding.
        self.progress.padding = 0;
        let mut order = self.order.take();
        let delivered = order.as_ref().map_or(0, |order| order.len() - self.remaining);
        let mut next = move || order.as_mut().map_or_else(Vec::new, Batches::next_without_padding);
        (0..delivered).for_each(|_| drop(next()));
        self.map(move |batch| {
            let indices = next();
            Ok((indices, batch?))
        })
    }

    /// The loader is where this iterator is.
    fn moved(&mut self, consumed: usize) {
        let position = self.position.clone();
        let mut position = lock(&position);
        if let Some(said) = self.restart.take()
            && position.epoch == self.here.epoch
            && position.consumed > 0
            && !position.resume
        {
            self.here.restarts = position.restarts + 1;
            // A program may look at the first batch before it trains.
            let step = self.progress.batch_size.saturating_mul(self.progress.world_size);
            let places = self.here.order.as_ref().and_then(|order| order.places_of(position.consumed));
            if self.here.restarts > 1 || places.is_none_or(|places| places > step) {
                said.call_once(|| warn_of_restart(self.here.epoch, position.consumed));
            }
        }
        self.here.consumed = consumed;
        self.here.ended = self.remaining == 0;
        *position = self.here.clone();
    }

    /// Whether the loader has got a state since.
    fn is_outdated(&self) -> bool {
        lock(&self.position).resumes != self.here.resumes
    }

    /// The epoch is over, unless the program has moved the loader since.
    fn finish(&mut self) {
        self.batches = None;
        let mut position = lock(&self.position);
        let place = |position: &Position| (position.resumes, position.epoch, position.consumed);
        if place(&position) == place(&self.here) {
            position.enter(self.here.epoch + 1);
        }
        if let Progress { padding: padding @ 1.., .. } = self.progress
            && let Some(order) = &self.here.order
            && origin::is_evaluation(self.number(), self.here.epoch)
        {
            static ONCE: Once = Once::new();
            ONCE.call_once(|| warn_of_padding(padding, order));
        }
    }

    /// A number that no other loader has.
    fn number(&self) -> usize {
        Arc::as_ptr(&self.position).addr()
    }

    /// The loader's position before the step of the next batch.
    pub(super) fn step(&self, seed: u64, dataset_len: usize) -> LoaderState {
        self.here.state(seed, dataset_len)
    }

    /// The place of the next batch in its step.
    pub(super) fn place(&self) -> usize {
        self.progress.delivered
    }
}

impl<T> Iterator for LoaderIter<T> {
    type Item = Result<T>;

    fn next(&mut self) -> Option<Result<T>> {
        if let Some(failure) = self.failure.take() {
            self.remaining = 0;
            return Some(Err(failure));
        }
        if self.remaining > 0 && self.is_outdated() {
            (self.batches, self.remaining) = (None, 0);
            let reason = "the loader has got it after this iterator was made, so the iterator would give samples that have been trained \
                          with: make the iterator after load_latest, load_state_dict or resume";
            return Some(Err(Error::invalid("state", reason)));
        }
        match self.batches.as_mut()?.next() {
            Some(batch) => {
                self.remaining -= 1;
                origin::delivered(self.number(), self.here.epoch);
                if let Some(order) = &self.here.order
                    && self.progress.advance(order)
                {
                    let consumed = order.samples(self.progress.consumed);
                    self.moved(consumed);
                }
                Some(batch)
            }
            None => {
                self.finish();
                None
            }
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.remaining, Some(self.remaining))
    }
}

/// A loop that counts its batches, such as one over `take(n)`, never asks for the batch after the last one.
impl<T> Drop for LoaderIter<T> {
    fn drop(&mut self) {
        if self.batches.is_some() && self.here.ended && lock(&self.position).ended {
            self.finish();
        }
    }
}

fn warn_of_padding(padding: usize, order: &EpochOrder) {
    warn_aloud(format_args!(
        "an evaluation has read an epoch with padding: {padding} of {} {} came twice, so that all ranks had the same number, and \
         sums over the ranks count them twice. Evaluate with SamplerOptions {{ shuffle: false, remainder: Remainder::Uneven, .. }}",
        order.places(),
        if order.num_batches().is_some() { "batches" } else { "samples" }
    ));
}

fn warn_of_restart(epoch: u64, consumed: usize) {
    warn_aloud(format_args!(
        "a loader begins epoch {epoch} again, with the same samples in the same order, since no iterator has read it to its end \
         (the last one stopped after {consumed} samples of all ranks). A loop that ends an epoch early, as with `take(n)`, `break` \
         or `iter().next()`, calls `loader.epoch(n)` with the number of each epoch, or keeps one iterator until it returns None"
    ));
}

debug_fields!(<T> LoaderIter<T>: |this| epoch = this.here.epoch, consumed = this.here.consumed,
    remaining = this.remaining);

impl<T> ExactSizeIterator for LoaderIter<T> {}

/// Makes a batch when it is asked for, on the thread that asks.
pub(super) struct Inline<D, F> {
    recipe: Recipe<D, F>,
    order: Batches,
    /// The indices of the current batch, kept for its memory.
    indices: Vec<usize>,
    watch: Watch,
}

impl<D, F> Inline<D, F> {
    pub(super) fn new(recipe: Recipe<D, F>, order: Batches, options: &LoaderOptions) -> Self {
        let watch = Watch::start(Patience::new(recipe.rank, options));
        Self { recipe, order, indices: Vec::new(), watch }
    }
}

impl<D: Dataset, T, F: Fn(Vec<D::Sample>) -> Result<T>> Iterator for Inline<D, F> {
    type Item = Result<T>;

    fn next(&mut self) -> Option<Result<T>> {
        if !self.order.next_into(&mut self.indices) {
            return None;
        }
        let read = |&index: &usize| {
            let text = move || {
                format!(
                    "is in Dataset::get of sample {index}. If that is only slow, give the DataLoader workers (num_workers)"
                )
            };
            during(text, || self.watch.during(index, || self.recipe.read(index)))
        };
        let samples = self.indices.iter().map(read).collect();
        Some(self.recipe.collate(&self.indices, samples))
    }
}
