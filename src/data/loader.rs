//! Batches of a dataset, for each rank.
use super::batch::{Batch, to_device};
use super::iter::{Inline, Position, Source};
use super::recipe::Recipe;
#[cfg(feature = "cuda")]
use super::upload::{Staged, Uploads};
use super::workers::Workers;
use super::{
    Collate, Dataset, DistributedSampler, LoaderIter, LoaderOptions, LoaderState, MicroBatches, SamplerOptions,
    default_collate,
};
use crate::backend::Label;
#[cfg(feature = "cuda")]
use crate::kernels::Uploader;
use crate::panic::lock;
use crate::process_group::ProcessGroup;
use crate::state::StateDict;
use crate::virtual_ranks::VirtualRanks;
use crate::{Error, Result};
use candle_core::{Device, Tensor};
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

/// Makes batches of a [`Dataset`]: each rank gets its part of the samples, as a [`DistributedSampler`] deals them out. Worker
/// threads read ahead of training if [`num_workers`](LoaderOptions::num_workers) says so. The loader knows its position, so a
/// checkpoint with its [`state`](Self::state) lets a run resume in the middle of an epoch, as with torchdata's
/// `StatefulDataLoader`.
///
/// `T` is the type of the batches. A struct can hold a `DataLoader<TensorDataset<(Tensor, Tensor)>, (Tensor, Tensor)>`.
///
/// **Order.** Batches come in the sampler's order, whatever the workers do, and are the same for any number of workers:
/// [`Dataset::get`] gets a generator that depends only on the seed, the epoch, the index and the rank.
///
/// **Device.** Batches are moved to the group's device. With workers and a GPU, each batch goes into pinned memory and is
/// copied on a separate stream, one batch ahead; candle's stream waits for the copy, and the calling thread does not. A worker
/// must not make tensors on a GPU, because each thread has its own stream there. For the same reason, iterate on the thread that
/// trains.
///
/// **Read-ahead.** At most `num_workers * prefetch_factor` batches are begun and not delivered. Workers share the next
/// batch, sample by sample, so a slow sample delays the others only when the read-ahead is used up. While workers collate, the
/// samples of at most `num_workers` batches are in memory as well. The batch that the program holds is not counted.
///
/// **Errors.** An error or a panic in the dataset or in `collate` arrives as [`Error::Samples`] in place of its batch, and names
/// the index. The batches after it can still be read.
///
/// **Threads.** Each iterator starts its own workers and ends them when it is dropped: each worker ends after the sample
/// that it is reading, and nobody waits for it. Workers share the ownership of the dataset and of `collate`.
/// In a worker, candle's operations, and everything else that uses rayon, run on the worker's own thread, so workers and
/// training do not compete for the threads of rayon's global pool. `ddprun` sets `RAYON_NUM_THREADS` to a rank's share of
/// the processors; lower that number if reading takes whole processors.
///
/// ```
/// use candle_ddp::data::{DataLoader, Dataset, LoaderOptions};
/// use candle_ddp::seed::Generator;
///
/// /// Noise around each sample's index.
/// struct Noisy;
///
/// impl Dataset for Noisy {
///     type Sample = (f32, u32);
///
///     fn len(&self) -> usize {
///         100
///     }
///
///     fn get(&self, index: usize, random: &mut Generator) -> candle_ddp::Result<(f32, u32)> {
///         Ok((index as f32 + random.uniform(-0.1, 0.1) as f32, index as u32))
///     }
/// }
///
/// # candle_ddp::spawn(2, |pg| {
/// let options = LoaderOptions { batch_size: 10, num_workers: 2, ..Default::default() };
/// let loader = DataLoader::new(Noisy, &pg, options)?;
/// for epoch in 0..3 {
///     for batch in loader.epoch(epoch) {
///         let (x, y) = batch?;
///         assert_eq!((x.dims(), y.dims()), (&[10][..], &[10][..]));
///     }
/// }
/// # Ok(())
/// # })?;
/// # Ok::<(), candle_ddp::Error>(())
/// ```
pub struct DataLoader<D: Dataset, T> {
    dataset: Arc<D>,
    collate: MakeBatch<D, T>,
    /// Its epoch is not used.
    sampler: DistributedSampler,
    options: LoaderOptions,
    /// Where batches go; None leaves them where `collate` made them.
    device: Option<Device>,
    position: Arc<Mutex<Position>>,
    /// Kept for its pinned memory.
    #[cfg(feature = "cuda")]
    uploader: Mutex<Option<Arc<Uploader>>>,
}

type MakeBatch<D, T> = Arc<dyn Fn(Vec<<D as Dataset>::Sample>) -> Result<T> + Send + Sync>;

impl<D, T> DataLoader<D, T>
where
    D: Dataset + 'static,
    D::Sample: Collate<Batch = T> + 'static,
    T: Batch + Send + 'static,
{
    /// A loader of this rank's part of `dataset`, with batches on the group's device. [`default_collate`] makes them. Every
    /// rank must call it.
    ///
    /// # Errors
    /// The same error on every rank: [`Error::Mismatch`] if ranks give datasets of different lengths or other options,
    /// [`Error::RankFailed`] with the error of a rank whose options are invalid: `batch_size` is 0, there are workers and
    /// `prefetch_factor` is 0, the dataset is empty, or no rank would have a batch in an epoch.
    pub fn new(dataset: D, group: &ProcessGroup, options: LoaderOptions) -> Result<Self> {
        Self::with_collate(dataset, group, options, default_collate)
    }
}

impl<D, T> DataLoader<D, T>
where
    D: Dataset + 'static,
    D::Sample: 'static,
    T: Batch + Send + 'static,
{
    /// Like [`new`](Self::new); `collate` makes a batch of samples.
    ///
    /// # Errors
    /// Those of [`new`](Self::new).
    pub fn with_collate<C>(dataset: D, group: &ProcessGroup, options: LoaderOptions, collate: C) -> Result<Self>
    where
        C: Fn(Vec<D::Sample>) -> Result<T> + Send + Sync + 'static,
    {
        let len = dataset.len();
        let (rank, world_size) = (group.rank(), group.world_size());
        let sampler = match options.virtual_ranks {
            None => DistributedSampler::new(len, rank, world_size, options.sampler),
            Some(count) => {
                options.check().and_then(|()| VirtualRanks::new(count, rank, world_size)).and_then(|ranks| {
                    let LoaderOptions { batch_size, drop_last, sampler, .. } = options;
                    DistributedSampler::of_virtual_ranks(len, &ranks, batch_size, drop_last, sampler)
                })
            }
        };
        let loader = sampler.and_then(|sampler| Self::make(dataset, sampler, options, Some(group.device()), collate));
        let described = loader.as_ref().map(|_| format!("length of the dataset: {len}\noptions: {options:?}"));
        match Label::LOADER_NEW.during(|| group.compare(described, "it could not make its DataLoader"))? {
            None => loader.inspect(|loader| loader.warn_of_no_batch(group.rank())),
            Some((rank, difference)) => Err(Error::Mismatch { what: "data loader", rank, difference }),
        }
    }

    /// A loader of the samples that `sampler` gives, beginning with the sampler's epoch. It communicates with no other rank, and
    /// batches stay where `collate` makes them.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for invalid options (see [`new`](Self::new)), for a sampler of a dataset of another length,
    /// and for options that have another `sampler` than the default, which would be ignored.
    pub fn from_sampler<C>(dataset: D, sampler: DistributedSampler, options: LoaderOptions, collate: C) -> Result<Self>
    where
        C: Fn(Vec<D::Sample>) -> Result<T> + Send + Sync + 'static,
    {
        if options.sampler != SamplerOptions::default() {
            let reason = "the options of a loader that is given its sampler must not have sampler options: give them to the sampler";
            return Err(Error::invalid("options", reason));
        }
        if options.virtual_ranks.is_some() {
            let reason = "a loader of virtual ranks makes its sampler itself: use `DataLoader::new` or `with_collate`";
            return Err(Error::invalid("virtual_ranks", reason));
        }
        Self::make(dataset, sampler, options, None, collate)
    }

    fn make<C>(
        dataset: D,
        sampler: DistributedSampler,
        options: LoaderOptions,
        device: Option<&Device>,
        collate: C,
    ) -> Result<Self>
    where
        C: Fn(Vec<D::Sample>) -> Result<T> + Send + Sync + 'static,
    {
        options.check()?;
        if sampler.dataset_len() != dataset.len() {
            let (expected, found) = (sampler.dataset_len(), dataset.len());
            let reason = format!("it must be for this dataset of {found} samples, and is for {expected}");
            return Err(Error::invalid("sampler", reason));
        }
        // With Remainder::Uneven, some ranks may have fewer batches than rank 0, or none.
        let most = sampler.most_after(0);
        if options.num_batches(most) == 0 {
            return Err(options.no_batch(most));
        }
        let position = Arc::new(Mutex::new(Position { epoch: sampler.epoch(), consumed: 0, resume: false }));
        Ok(Self {
            dataset: Arc::new(dataset),
            collate: Arc::new(collate),
            sampler,
            options,
            device: device.cloned(),
            position,
            #[cfg(feature = "cuda")]
            uploader: Mutex::default(),
        })
    }

    /// The loader with batches on `device` instead of the group's.
    pub fn to_device(self, device: &Device) -> Self {
        Self { device: Some(device.clone()), ..self }
    }

    /// The batches of epoch `epoch`: [`set_epoch`](Self::set_epoch) and [`iter`](Self::iter). In a loop that begins with
    /// [`current_epoch`](Self::current_epoch), a resumed run continues in the middle of its epoch.
    pub fn epoch(&self, epoch: u64) -> LoaderIter<T> {
        self.set_epoch(epoch);
        self.iter()
    }

    /// The batches of the current epoch. The first iterator after a [`resume`](Self::resume) continues where the resumed run
    /// stopped. The loader enters the next epoch when the iterator has returned `None`, and not before.
    ///
    /// Use one iterator at a time: the position is that of the one that has delivered last.
    pub fn iter(&self) -> LoaderIter<T> {
        let mut start = *self.position();
        if !start.resume {
            start.consumed = 0;
        }
        let mut sampler = self.sampler.clone();
        sampler.set_epoch(start.epoch);
        let batches = self.batches(&sampler, start.consumed);
        LoaderIter::new(batches, self.options, &sampler, start, self.position.clone())
    }

    /// Like [`iter`](Self::iter), with the number of each micro-batch: this rank's ones of each global batch, step by step, as
    /// [`backward_micro_batch`](crate::DistributedDataParallel::backward_micro_batch) takes them.
    ///
    /// The loader's [`state`](Self::state) moves on with the last micro-batch of a step. A run that resumes from a state in the
    /// middle of a step repeats the step.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a loader without [`virtual_ranks`](LoaderOptions::virtual_ranks).
    pub fn micro_batches(&self) -> Result<MicroBatches<T>> {
        if self.options.virtual_ranks.is_none() {
            let reason = "the loader has none, so its batches have no numbers: set LoaderOptions.virtual_ranks";
            return Err(Error::invalid("virtual_ranks", reason));
        }
        Ok(MicroBatches::new(self.iter(), &self.sampler))
    }

    fn batches(&self, sampler: &DistributedSampler, consumed: usize) -> Result<Source<T>> {
        let order = sampler.iter_after(consumed);
        let collate = self.collate.clone();
        #[cfg(feature = "cuda")]
        if let Some(Device::Cuda(gpu)) = &self.device
            && self.options.num_workers > 0
        {
            let uploader = self.uploader(gpu)?;
            let stage = uploader.clone();
            let recipe = self.recipe(sampler, move |samples| Staged::new(collate(samples)?, &stage));
            let workers = Workers::start(recipe, order, self.options)?;
            return Ok(Box::new(Uploads::new(workers, uploader)));
        }
        let recipe = self.recipe(sampler, move |samples| collate(samples));
        let batches: Source<T> = match self.options.num_workers {
            0 => Box::new(Inline::new(recipe, order, self.options)),
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
        let Position { epoch, consumed, .. } = *self.position();
        LoaderState { seed: self.sampler.seed(), epoch, consumed, dataset_len: self.dataset.len() }
    }

    /// Continues from the `state` of another run, which may have had another number of ranks and another batch size. The loader
    /// takes over its seed.
    ///
    /// No sample is read to get there. Over the whole epoch, each sample is seen as often as without the interruption: once,
    /// except that fewer than `world_size` samples are padding or dropped, as in any epoch.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] in the middle of an epoch if the dataset had another length.
    pub fn resume(&mut self, state: LoaderState) -> Result<()> {
        let LoaderState { seed, epoch, consumed, dataset_len } = state;
        let len = self.dataset.len();
        if consumed > 0 && (dataset_len != len || consumed > len) {
            let reason = format!(
                "a run in the middle of epoch {epoch}, after {consumed} samples, must continue with a dataset of {dataset_len} \
                 samples, and this one has {len}; otherwise samples would be repeated and left out. Continue with the same \
                 dataset, or begin an epoch (a state with consumed: 0)"
            );
            return Err(Error::invalid("state", reason));
        }
        self.sampler.set_seed(seed);
        *self.position() = Position { epoch, consumed, resume: true };
        Ok(())
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
            *position = Position { epoch, consumed: 0, resume: false };
        }
    }

    /// How many batches a whole epoch has on this rank. `iter().len()` is the number of remaining ones.
    pub fn num_batches(&self) -> usize {
        self.options.num_batches(self.sampler.len())
    }

    /// The dataset.
    pub fn dataset(&self) -> &D {
        &self.dataset
    }

    /// Other ranks have batches, so this one would only wait in their collectives, or make them wait.
    fn warn_of_no_batch(&self, rank: usize) {
        if self.num_batches() == 0 {
            log::warn!(
                "rank {rank} has no batch in an epoch, but others have: its part of the dataset is {} of {} samples, and \
                 batch_size {} with drop_last leaves them out. Use a smaller batch, fewer ranks, or no drop_last; in training, \
                 all ranks must have the same number of batches, or use ddp.join",
                self.sampler.len(),
                self.dataset.len(),
                self.options.batch_size
            );
        }
    }

    fn position(&self) -> MutexGuard<'_, Position> {
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

    fn recipe<F>(&self, sampler: &DistributedSampler, collate: F) -> Recipe<D, F> {
        // Augmentation must not depend on which rank computes a micro-batch.
        let rank = if self.options.virtual_ranks.is_some() { 0 } else { sampler.rank() };
        let (seed, epoch) = (sampler.seed(), sampler.epoch());
        Recipe { dataset: self.dataset.clone(), collate, seed, epoch, rank }
    }
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

impl<D: Dataset, T> fmt::Debug for DataLoader<D, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DataLoader")
            .field("options", &self.options)
            .field("device", &self.device)
            .field("state", &self.state())
            .finish_non_exhaustive()
    }
}
