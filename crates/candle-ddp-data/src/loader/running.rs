//! A loader while a program trains: its batches and its position.
use super::DataLoader;
use crate::batch::{Batch, to_device};
use crate::iter::{Inline, Position, Progress, Source};
use crate::micro_batch::MicroBatches;
use crate::order::Batches;
use crate::recipe::Recipe;
#[cfg(feature = "cuda")]
use crate::upload::{Staged, Uploads};
use crate::workers::Workers;
use crate::{Dataset, EpochOrder, LoaderIter, LoaderState, MicroBatch, Remainder};
#[cfg(feature = "cuda")]
use candle_core::Device;
use candle_core::Tensor;
use candle_ddp_base::panic::lock;
use candle_ddp_base::warnings::warn_aloud;
use candle_ddp_state::state::StateDict;
use candle_ddp_state::{Error, Result};
#[cfg(feature = "cuda")]
use candle_ddp_tensor::kernels::Uploader;
use std::collections::HashMap;
use std::sync::{Arc, MutexGuard};

impl<D, T> DataLoader<D, T>
where
    D: Dataset + 'static,
    D::Sample: 'static,
    T: Batch + Send + 'static,
{
    /// The batches of epoch `epoch`: [`set_epoch`](Self::set_epoch) and [`iter`](Self::iter). In a loop that begins with
    /// [`current_epoch`](Self::current_epoch), a resumed run continues in the middle of its epoch.
    pub fn epoch(&self, epoch: u64) -> LoaderIter<T> {
        self.set_epoch(epoch);
        self.iter()
    }

    /// The batches of the current epoch. The first iterator after a [`resume`](Self::resume) continues where the resumed run
    /// stopped. The loader enters the next epoch when the iterator has returned `None`. It also does so when the iterator has
    /// delivered the last batch and is dropped, or another iterator begins, so that a loop over `take(n)` may read all batches.
    ///
    /// An iterator that is dropped before that leaves the loader in its epoch. The next iterator reads that epoch from its
    /// beginning, as in PyTorch. Rank 0 warns of it, once: loops that end their epochs early choose them by [`epoch`](Self::epoch).
    ///
    /// Use one iterator at a time: the position is the one of the iterator that delivered last.
    pub fn iter(&self) -> LoaderIter<T> {
        let mut start = self.start();
        match self.begin(&mut start) {
            Ok((batches, order, progress)) => {
                // Without a shuffle, all epochs have the same order.
                let restart = (self.deal.rank == 0 && self.options.sampler.shuffle).then(|| self.restart.clone());
                LoaderIter::new(batches, order, progress, start, self.position.clone(), restart)
            }
            Err(error) => LoaderIter::failed(error, start, self.position.clone()),
        }
    }

    /// Like [`iter`](Self::iter), with the number of each micro-batch: this rank's ones of each global batch, step by step, as `Backward::micro_batch` takes
    /// it.
    ///
    /// The loader's [`state`](Self::state) moves on with the last micro-batch of a step. A run that resumes from a state in the
    /// middle of a step repeats the step.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a loader without micro-batches: its group has no virtual ranks (`InitOptions::virtual_ranks`),
    /// or it has no group, or [`Remainder::Uneven`].
    pub fn micro_batches(&self) -> Result<impl ExactSizeIterator<Item = Result<MicroBatch<T>>> + use<D, T>> {
        if !self.deal.is_virtual() {
            let reason = "the loader has no micro-batches: make its group with InitOptions.virtual_ranks, and the loader in this \
                          group (not from a sampler), with Remainder::Pad or Drop";
            return Err(Error::invalid("virtual_ranks", reason));
        }
        let own = self.deal.rank..self.deal.rank + self.deal.batches_per_step();
        Ok(MicroBatches::new(self.iter(), own, self.seed, self.dataset.len()))
    }

    /// The position at which the next iterator begins.
    fn start(&self) -> Position {
        let mut position = self.position();
        if position.ended {
            let next = position.epoch + 1;
            position.enter(next);
        }
        let mut start = position.clone();
        if !start.resume {
            start.consumed = 0;
        }
        start
    }

    fn begin(&self, start: &mut Position) -> Result<(Source<T>, Batches, Progress)> {
        let order = self.order_of(start.epoch)?;
        start.order = Some(order.clone());
        let consumed = places_of(&order, start)?;
        let progress = Progress::new(&order, consumed, &self.deal, &self.options);
        let batches = Batches::new(order, consumed, &self.deal, self.options);
        Ok((self.batches(batches.clone(), start.epoch)?, batches, progress))
    }

    fn batches(&self, order: Batches, epoch: u64) -> Result<Source<T>> {
        let collate = self.collate.clone();
        #[cfg(feature = "cuda")]
        if let Some(Device::Cuda(gpu)) = &self.device
            && self.options.num_workers > 0
        {
            let uploader = self.uploader(gpu)?;
            let stage = uploader.clone();
            let recipe = self.recipe(epoch, move |samples| Staged::new(collate(samples)?, &stage));
            let workers = Workers::start(recipe, order, self.options)?;
            return Ok(Box::new(Uploads::new(workers, uploader)));
        }
        let recipe = self.recipe(epoch, move |samples| collate(samples));
        let batches: Source<T> = match self.options.num_workers {
            0 => Box::new(Inline::new(recipe, order, &self.options)),
            _ => Box::new(Workers::start(recipe, order, self.options)?),
        };
        Ok(match self.device.clone() {
            Some(device) => Box::new(batches.map(move |batch| batch.and_then(|batch| to_device(batch, &device)))),
            None => batches,
        })
    }
}

impl<D: Dataset, T> DataLoader<D, T> {
    /// The position after the batches that the loader has delivered; batches that it has only read ahead do not count. Between
    /// two training steps it is the same on all ranks.
    pub fn state(&self) -> LoaderState {
        self.position().state(self.seed, self.dataset.len())
    }

    /// Continues from the `state` of another run, which may have had another number of ranks and another batch size. The loader
    /// takes over its seed.
    ///
    /// No sample is read to get there. Over the whole epoch, each sample is seen as often as without the interruption: once,
    /// except that fewer than `world_size` samples are padding or dropped, as in any epoch. Iterators that were made before return an
    /// error.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] in the middle of an epoch if the dataset had another length, or the epoch another order: if it
    /// was shuffled and is not, or has other weights or lengths, for example. The loader then stays where it was.
    pub fn resume(&mut self, state: LoaderState) -> Result<()> {
        let LoaderState { seed, epoch, consumed, dataset_len, order: expected } = state;
        let mut position = Position::resumed(epoch, consumed, self.position().resumes);
        if consumed > 0 {
            let len = self.dataset.len();
            if dataset_len != len {
                let reason = format!(
                    "a run in the middle of epoch {epoch}, after {consumed} samples, must continue with a dataset of \
                     {dataset_len} samples, and this one has {len}; otherwise samples would be repeated and left out. Continue \
                     with the same dataset, or begin an epoch (a state with consumed: 0)"
                );
                return Err(Error::invalid("state", reason));
            }
            let order = self.made(seed, epoch)?;
            if expected != 0 && expected != order.fingerprint() {
                let reason = format!(
                    "a run in the middle of epoch {epoch}, after {consumed} samples, must continue with the same order, and this \
                     one differs; otherwise samples would be repeated and left out. Continue with the same order (its weights, \
                     lengths and options, such as shuffle), or begin an epoch (a state with consumed: 0)"
                );
                return Err(Error::invalid("state", reason));
            }
            places_of(&order, &position)?;
            position.order = Some(order);
        }
        self.seed = seed;
        *self.position() = position;
        Ok(())
    }

    /// The order of an epoch.
    pub(super) fn order_of(&self, epoch: u64) -> Result<Arc<EpochOrder>> {
        let kept = self.position().clone();
        match kept.order.filter(|_| kept.epoch == epoch) {
            Some(order) => Ok(order),
            None => self.made(self.seed, epoch),
        }
    }

    fn made(&self, seed: u64, epoch: u64) -> Result<Arc<EpochOrder>> {
        let order = self.order.epoch_order(seed, epoch)?;
        order.check(self.dataset.len(), &self.deal, &self.options)?;
        Ok(Arc::new(order))
    }

    /// The current epoch.
    pub fn current_epoch(&self) -> u64 {
        self.position().epoch
    }

    /// Moves to the beginning of an epoch. It has no effect if the loader is in that epoch already, so a resumed run continues in
    /// its middle. A loop that reads every epoch to its end need not call it: the loader moves to the next epoch itself.
    pub fn set_epoch(&self, epoch: u64) {
        let mut position = self.position();
        if position.epoch != epoch {
            position.enter(epoch);
        } else {
            (position.chosen, position.ended) = (true, false);
        }
    }

    /// The number of batches that the whole current epoch has on this rank. `iter().len()` is the number of remaining ones. An order of
    /// the program's own is made to count them, if it was not yet; it may have another number in another epoch, and 0 here if
    /// it cannot be made, which the iterator then says.
    pub fn num_batches(&self) -> usize {
        let epoch = self.current_epoch();
        let order = self.order_of(epoch);
        let places = order.as_ref().map_or(0, |order| order.places());
        let mut position = self.position();
        if position.epoch == epoch {
            position.order = order.ok();
        }
        self.options.num_batches(self.deal.len_after(places, 0))
    }

    /// The dataset.
    pub fn dataset(&self) -> &D {
        &self.dataset
    }

    /// Says on rank 0, whose part is never smaller than another's, that other ranks have no batch: they would only wait in
    /// its collectives, or make it wait.
    pub(super) fn warn_of_no_batch(&self) {
        // Otherwise they all have as many, and to count them may take a permutation.
        if self.deal.rank > 0 || self.deal.remainder != Remainder::Uneven || self.num_batches() == 0 {
            return;
        }
        let places = self.order_of(self.current_epoch()).map_or(0, |order| order.places());
        let part = |rank| self.deal.rank_len_after(rank, places, 0);
        // The parts never grow from a rank to the next.
        if let Some(first) = (1..self.deal.world_size).find(|rank| self.options.num_batches(part(*rank)) == 0) {
            let last = self.deal.world_size - 1;
            let who =
                if first == last { format!("rank {last}") } else { format!("each of the ranks {first} to {last}") };
            warn_aloud(format_args!(
                "{who} has no batch in an epoch, but others have: its part of the dataset is {} of {places} samples, and \
                 batch_size {} with drop_last leaves them out. Use a smaller batch, fewer ranks, or no drop_last; in training, \
                 all ranks must have the same number of batches, or use ddp.join",
                part(first),
                self.options.batch_size
            ));
        }
    }

    pub(super) fn position(&self) -> MutexGuard<'_, Position> {
        lock(&self.position)
    }

    #[cfg(feature = "cuda")]
    fn uploader(&self, gpu: &candle_core::CudaDevice) -> Result<Arc<Uploader>> {
        let mut kept = lock(&self.uploader);
        if let Some(uploader) = kept.as_ref().filter(|uploader| uploader.device().id() == gpu.id()) {
            return Ok(uploader.clone());
        }
        let uploader = Arc::new(Uploader::new(gpu)?);
        *kept = Some(uploader.clone());
        Ok(uploader)
    }

    fn recipe<F>(&self, epoch: u64, collate: F) -> Recipe<D, F> {
        // Augmentation must not depend on which rank computes a micro-batch.
        let rank = if self.deal.is_virtual() { 0 } else { self.deal.rank };
        Recipe { dataset: self.dataset.clone(), collate, seed: self.seed, epoch, rank }
    }
}

/// How many places of its order were consumed at a position.
fn places_of(order: &EpochOrder, position: &Position) -> Result<usize> {
    order.places_of(position.consumed).ok_or_else(|| {
        let Position { epoch, consumed, .. } = position;
        let reason = format!(
            "epoch {epoch} has {} samples, and none of its batches ends after {consumed}, so that no run can have stopped there. \
             Continue with the same order, or begin an epoch (a state with consumed: 0)",
            order.len()
        );
        Error::invalid("state", reason)
    })
}

impl<D, T> IntoIterator for &DataLoader<D, T>
where
    D: Dataset + 'static,
    D::Sample: 'static,
    T: Batch + Send + 'static,
{
    type Item = Result<T>;
    type IntoIter = LoaderIter<T>;

    fn into_iter(self) -> LoaderIter<T> {
        self.iter()
    }
}

/// The [`state`](DataLoader::state) and [`resume`](DataLoader::resume).
impl<D: Dataset, T> StateDict for DataLoader<D, T> {
    fn state_dict(&self) -> Result<HashMap<String, Tensor>> {
        self.state().state_dict()
    }

    fn load_state_dict(&mut self, dict: &HashMap<String, Tensor>) -> Result<()> {
        let mut state = self.state();
        state.load_state_dict(dict)?;
        self.resume(state)
    }
}
