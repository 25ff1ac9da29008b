//! A data loader with worker threads and a state.
use super::batch::{Batch, to_device};
use super::recipe::Recipe;
use super::stateful_iter::{Inline, Position, Source};
#[cfg(feature = "cuda")]
use super::upload::{Staged, Uploads};
use super::workers::Workers;
use super::{Dataset, DistributedSampler, LoaderIter, LoaderOptions, LoaderState};
#[cfg(feature = "cuda")]
use crate::kernels::Uploader;
use crate::panic::lock;
use crate::state::StateDict;
use crate::{Error, Result};
use candle_core::{Device, Tensor};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

/// Reads the samples of a [`Dataset`] in the order of a [`DistributedSampler`] and makes batches of them, on worker threads
/// and ahead of training if [`num_workers`](LoaderOptions::num_workers) says so. It knows where it is: [`state`](Self::state)
/// goes into a checkpoint, and a run that loads it goes on in the middle of an epoch. `torchdata` has the name.
///
/// **Order.** Batches come in the sampler's order, whatever the workers do, and are the same for any number of workers:
/// [`Dataset::get`] gets a generator that depends on the seed, the epoch, the index and the rank alone.
///
/// **Read-ahead.** At most `num_workers * prefetch_factor` batches are begun and not delivered. Workers share the next
/// batch, sample by sample, so a slow sample holds up the others only when the read-ahead is used up. In bytes, there are
/// at most that many batches, and while the last workers make batches of their samples, these samples: at most
/// `num_workers` batches more. The batch that the program holds is not among them.
///
/// **Errors.** What goes wrong in the dataset or in `collate`, also a panic, arrives as [`Error::Samples`] in the place of
/// its batch, and names the index. The batches after it can still be read.
///
/// **Threads.** Each iterator starts workers of its own and ends them when it is dropped: each worker ends after the sample
/// that it is reading, and nobody waits for it. Workers share the ownership of the dataset and of `collate`, so they never
/// outlive what they use.
/// In a worker, candle's operations, and whatever else uses rayon, run on the worker's own thread, so that workers and
/// training do not compete for the threads of rayon's global pool. Workers come on top of those: with `ddprun`, which
/// sets `RAYON_NUM_THREADS` to a rank's share of the processors, lower that number if reading takes whole processors.
///
/// ```
/// use candle_ddp::data::{Dataset, DistributedSampler, LoaderOptions, StatefulDataLoader, default_collate};
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
/// let sampler = DistributedSampler::new(100, 2, 0, Default::default())?; // of rank 0 of 2
/// let options = LoaderOptions { batch_size: 10, num_workers: 2, ..Default::default() };
/// let loader = StatefulDataLoader::new(Noisy, sampler, options, default_collate)?;
/// while loader.epoch() < 3 {
///     for batch in &loader {
///         let (x, y) = batch?;
///         assert_eq!((x.dims(), y.dims()), (&[10][..], &[10][..]));
///     }
/// }
/// # Ok::<(), candle_ddp::Error>(())
/// ```
pub struct StatefulDataLoader<D, C> {
    dataset: Arc<D>,
    collate: Arc<C>,
    /// Its epoch is not used.
    sampler: DistributedSampler,
    options: LoaderOptions,
    position: Mutex<Position>,
    /// Kept for its pinned memory.
    #[cfg(feature = "cuda")]
    uploader: Mutex<Option<Arc<Uploader>>>,
}

impl<D, C, T> StatefulDataLoader<D, C>
where
    D: Dataset + 'static,
    D::Sample: 'static,
    C: Fn(Vec<D::Sample>) -> Result<T> + Send + Sync + 'static,
    T: Send + 'static,
{
    /// A loader of the samples that `sampler` gives this rank, beginning with the sampler's epoch. `collate` makes a batch
    /// of samples: [`default_collate`](super::default_collate) or a function of the program.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `batch_size` is 0, if there are workers and `prefetch_factor` is 0, if the sampler is for a
    /// dataset of another length, or if no rank would have a batch in an epoch.
    pub fn new(dataset: D, sampler: DistributedSampler, options: LoaderOptions, collate: C) -> Result<Self> {
        options.check()?;
        if sampler.dataset_len() != dataset.len() {
            let (expected, found) = (sampler.dataset_len(), dataset.len());
            let reason = format!("it is for a dataset of {expected} samples, and this one has {found}");
            return Err(Error::invalid("sampler", reason));
        }
        // Without padding, some ranks may have fewer batches than rank 0, or none.
        let most = sampler.most_after(0);
        if options.num_batches(most) == 0 {
            return Err(options.no_batch(most));
        }
        let position = Mutex::new(Position { epoch: sampler.epoch(), consumed: 0, resume: false });
        Ok(Self {
            dataset: Arc::new(dataset),
            collate: Arc::new(collate),
            sampler,
            options,
            position,
            #[cfg(feature = "cuda")]
            uploader: Mutex::default(),
        })
    }

    /// The batches of this epoch, one after the other; the first iterator after a [`resume`](Self::resume) goes on where the
    /// resumed run has stopped. When it has returned `None`, and not before, the loader is in the next epoch.
    ///
    /// Use one iterator at a time: the state is that of the one that has delivered last.
    pub fn iter(&self) -> LoaderIter<'_, T> {
        let (start, sampler) = self.start();
        let batches = self.batches(&sampler, start.consumed);
        LoaderIter::new(batches, self.options, &sampler, start, &self.position)
    }

    /// [`iter`](Self::iter), with the batches on `device`. Workers put batches for a GPU into pinned memory. They are copied
    /// on a stream of their own, one batch ahead, and candle's stream waits for the copy, which the calling thread does not.
    ///
    /// The device of a batch's tensors is the CPU until then: a worker must not make tensors on a GPU, because each thread
    /// has its own stream there. Call it on the thread that trains, for the same reason.
    pub fn iter_on(&self, device: &Device) -> LoaderIter<'_, T>
    where
        T: Batch,
    {
        let (start, sampler) = self.start();
        let batches = self.batches_on(device, &sampler, start.consumed);
        LoaderIter::new(batches, self.options, &sampler, start, &self.position)
    }

    fn batches(&self, sampler: &DistributedSampler, consumed: usize) -> Result<Source<'_, T>> {
        let order = sampler.iter_after(consumed);
        let collate = self.collate.clone();
        let recipe = self.recipe(sampler, move |samples| collate(samples));
        Ok(match self.options.num_workers {
            0 => Box::new(Inline::new(recipe, order, self.options)),
            _ => Box::new(Workers::start(recipe, order, self.options)?),
        })
    }

    fn batches_on(&self, device: &Device, sampler: &DistributedSampler, consumed: usize) -> Result<Source<'_, T>>
    where
        T: Batch,
    {
        #[cfg(feature = "cuda")]
        if let Device::Cuda(gpu) = device
            && self.options.num_workers > 0
        {
            let uploader = self.uploader(gpu)?;
            let (collate, stage) = (self.collate.clone(), uploader.clone());
            let recipe = self.recipe(sampler, move |samples| Staged::new(collate(samples)?, &stage));
            let workers = Workers::start(recipe, sampler.iter_after(consumed), self.options)?;
            return Ok(Box::new(Uploads::new(workers, uploader)));
        }
        let device = device.clone();
        let batches = self.batches(sampler, consumed)?;
        Ok(Box::new(batches.map(move |batch| batch.and_then(|batch| to_device(batch, &device)))))
    }
}

impl<D: Dataset, C> StatefulDataLoader<D, C> {
    /// Where the loader is: after the batches that it has delivered, whatever it has read ahead. Between two training steps
    /// it is the same on all ranks.
    pub fn state(&self) -> LoaderState {
        let Position { epoch, consumed, .. } = *self.position();
        LoaderState { seed: self.sampler.seed(), epoch, consumed, dataset_len: self.dataset.len() }
    }

    /// Goes on from the `state` of another run, whose number of ranks and batch size may have been others. The seed is taken
    /// over as well.
    ///
    /// Nothing is read to get there. Over the whole epoch, each sample is seen as often as without the interruption: once,
    /// except that fewer than `world_size` samples are padding or dropped, as in any epoch.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] in the middle of an epoch if the dataset had another length.
    pub fn resume(&mut self, state: LoaderState) -> Result<()> {
        let LoaderState { seed, epoch, consumed, dataset_len } = state;
        let len = self.dataset.len();
        if consumed > 0 && (dataset_len != len || consumed > len) {
            let reason = format!(
                "it is the state of a run in the middle of epoch {epoch}, after {consumed} samples of a dataset of {dataset_len} \
                 samples, and this one has {len}: in the order of another dataset, samples would be repeated and left out. Go \
                 on with the same dataset, or begin an epoch (a state with consumed: 0)"
            );
            return Err(Error::invalid("state", reason));
        }
        self.sampler.set_seed(seed);
        *self.position() = Position { epoch, consumed, resume: true };
        Ok(())
    }

    /// The current epoch.
    pub fn epoch(&self) -> usize {
        self.position().epoch
    }

    /// Goes to the beginning of an epoch. Nothing happens if the loader is in it, so that a resumed run goes on in its
    /// middle. A loop that reads every epoch to its end needs no call: the loader goes to the next epoch by itself.
    pub fn set_epoch(&mut self, epoch: usize) {
        let mut position = self.position();
        if position.epoch != epoch {
            *position = Position { epoch, consumed: 0, resume: false };
        }
    }

    /// How many batches a whole epoch has on this rank. `iter().len()` is what is left of one.
    pub fn num_batches(&self) -> usize {
        self.options.num_batches(self.sampler.len())
    }

    /// The dataset.
    pub fn dataset(&self) -> &D {
        &self.dataset
    }

    fn position(&self) -> MutexGuard<'_, Position> {
        lock(&self.position)
    }

    /// Where the next iterator begins, and the sampler of its epoch.
    fn start(&self) -> (Position, DistributedSampler) {
        let mut start = *self.position();
        if !start.resume {
            start.consumed = 0;
        }
        let mut sampler = self.sampler.clone();
        sampler.set_epoch(start.epoch);
        (start, sampler)
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
        let (seed, epoch, rank) = (sampler.seed(), sampler.epoch(), sampler.rank());
        Recipe { dataset: self.dataset.clone(), collate, seed, epoch, rank }
    }
}

impl<'a, D, C, T> IntoIterator for &'a StatefulDataLoader<D, C>
where
    D: Dataset + 'static,
    D::Sample: 'static,
    C: Fn(Vec<D::Sample>) -> Result<T> + Send + Sync + 'static,
    T: Send + 'static,
{
    type Item = Result<T>;
    type IntoIter = LoaderIter<'a, T>;

    fn into_iter(self) -> LoaderIter<'a, T> {
        self.iter()
    }
}

/// The [`state`](StatefulDataLoader::state) and [`resume`](StatefulDataLoader::resume).
impl<D: Dataset, C> StateDict for StatefulDataLoader<D, C> {
    fn state_dict(&self) -> Result<HashMap<String, Tensor>> {
        self.state().state_dict()
    }

    fn load_state_dict(&mut self, dict: &HashMap<String, Tensor>) -> Result<()> {
        let mut state = self.state();
        state.load_state_dict(dict)?;
        self.resume(state)
    }
}
