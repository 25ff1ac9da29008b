//! Batches of a dataset, for each rank.
mod running;

use super::batch::Batch;
use super::deal::Deal;
use super::iter::Position;
use super::{Collate, Dataset, DistributedSampler, LoaderGroup, LoaderOptions, Order, SamplerOptions, default_collate};
use candle_core::Device;
use candle_ddp_base::debug_fields;
use candle_ddp_state::{Error, Result};
#[cfg(feature = "cuda")]
use candle_ddp_tensor::kernels::Uploader;
use std::sync::{Arc, Mutex, Once};

/// Makes batches of a [`Dataset`]: each rank gets its part of the samples, as a [`DistributedSampler`] deals them out, or in
/// another [`Order`] ([`with_order`](Self::with_order)). Worker threads read ahead of training if [`num_workers`](LoaderOptions::num_workers) says so. The loader knows its position, so a
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
/// **Samples that never come.** A worker whose [`Dataset::get`] does not return, as on a network disk that has gone, costs its batch: the
/// rank warns, and after [`timeout`](LoaderOptions::timeout) gets [`Error::LoaderTimedOut`] in its place, with the worker and the index. In
/// `ProcessGroup::abort_on_error`, the other ranks get that error as well. The batches after it can still be read, by
/// the other workers. Without workers, the calling thread itself is stuck. Another thread then warns, and the other ranks' time-out
/// names the sample.
///
/// **Threads.** Each iterator starts its own workers and ends them when it is dropped: each worker ends after the sample
/// that it is reading, and nobody waits for it, also if it never ends. Workers share the ownership of the dataset and of `collate`.
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
    order: Arc<dyn Order>,
    deal: Deal,
    /// The seed of the order and of augmentation.
    seed: u64,
    options: LoaderOptions,
    /// Where batches go; None leaves them where `collate` made them.
    device: Option<Device>,
    position: Arc<Mutex<Position>>,
    /// Whether rank 0 has warned of an epoch that begins again.
    restart: Arc<Once>,
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
    /// A loader of this rank's part of `dataset`, with batches on the device of `group`, candle-ddp's `ProcessGroup`.
    /// [`default_collate`] makes them. Every rank must call it.
    ///
    /// # Errors
    /// The same error on every rank: [`Error::Mismatch`] if ranks give datasets of different lengths or other options,
    /// [`Error::RankFailed`] with the error of a rank whose options are invalid: `batch_size` is 0, there are workers and
    /// `prefetch_factor` is 0, the dataset is empty, or no rank would have a batch in an epoch.
    pub fn new(dataset: D, group: &dyn LoaderGroup, options: LoaderOptions) -> Result<Self> {
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
    /// The errors of [`new`](Self::new).
    pub fn with_collate<C>(dataset: D, group: &dyn LoaderGroup, options: LoaderOptions, collate: C) -> Result<Self>
    where
        C: Fn(Vec<D::Sample>) -> Result<T> + Send + Sync + 'static,
    {
        let (len, sampler) = (dataset.len(), options.sampler);
        let deal = Deal::of(&options, group);
        let sampler = deal.and_then(|deal| DistributedSampler::of(len, deal, sampler));
        let timed = options.of_group(group);
        let loader =
            sampler.and_then(|sampler| Self::of_sampler(dataset, sampler, timed, Some(group.device()), collate));
        Self::compared(loader, group, |_| format!("length of the dataset: {len}\noptions: {options:?}"))
    }

    /// A loader of the samples of an order of the program's own, such as a [`WeightedSampler`](super::WeightedSampler), with
    /// batches on the group's device. The ranks take turns in the order. Every rank must call it.
    ///
    /// Of [`options.sampler`](LoaderOptions::sampler), the seed is given to the order, and
    /// [`remainder`](SamplerOptions::remainder) holds for its samples, or its batches if it makes them. `shuffle` is up to the
    /// order and must be true, the default.
    ///
    /// # Errors
    /// The same error on every rank: [`Error::Mismatch`] if ranks give datasets of different lengths, other options, or orders
    /// that differ in epoch 0; [`Error::RankFailed`] with the error of a rank whose options are invalid (see
    /// [`new`](Self::new)), whose order returns an error, is for a dataset of another length, has an index that is not in the
    /// dataset, or has no sample; or makes the batches itself, and there is a `batch_size`.
    pub fn with_order<C>(
        dataset: D,
        order: impl Order + 'static,
        group: &dyn LoaderGroup,
        options: LoaderOptions,
        collate: C,
    ) -> Result<Self>
    where
        C: Fn(Vec<D::Sample>) -> Result<T> + Send + Sync + 'static,
    {
        let len = dataset.len();
        let make = || {
            if !options.sampler.shuffle {
                let reason = "shuffle is up to the order, so that it must be true here, the default";
                return Err(Error::invalid("options", reason));
            }
            let (deal, seed) = (Deal::of(&options, group)?, options.sampler.seed);
            let order: Arc<dyn Order> = Arc::new(order);
            let timed = options.of_group(group);
            let loader = Self::make(dataset, ("order", order), (deal, seed, 0), timed, Some(group.device()), collate)?;
            // Errors come early, and the ranks compare it.
            let order = loader.order_of(0)?;
            loader.position().order = Some(order);
            Ok(loader)
        };
        Self::compared(make(), group, |loader| {
            let order = loader.position().order.as_ref().map_or(0, |order| order.fingerprint());
            format!("length of the dataset: {len}\noptions: {options:?}\nhash of the order of epoch 0: {order:016x}")
        })
    }

    /// The loader, if all ranks have made one of the same description.
    fn compared(loader: Result<Self>, group: &dyn LoaderGroup, describe: impl Fn(&Self) -> String) -> Result<Self> {
        let virtual_ranks = group.virtual_ranks();
        let described = loader.as_ref().map(|loader| format!("virtual ranks: {virtual_ranks:?}\n{}", describe(loader)));
        match group.compare_loaders(described)? {
            None => loader.inspect(|loader| loader.warn_of_no_batch()),
            Some((rank, difference)) => Err(Error::Mismatch { what: "data loader", rank, difference }),
        }
    }

    /// A loader of the samples that `sampler` gives, beginning with the sampler's epoch. It communicates with no other rank, knows
    /// no virtual ranks, and batches stay where `collate` makes them.
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
        Self::of_sampler(dataset, sampler, options, None, collate)
    }

    fn of_sampler<C>(
        dataset: D,
        sampler: DistributedSampler,
        options: LoaderOptions,
        device: Option<&Device>,
        collate: C,
    ) -> Result<Self>
    where
        C: Fn(Vec<D::Sample>) -> Result<T> + Send + Sync + 'static,
    {
        let (deal, seed, epoch) = (sampler.deal(), sampler.seed(), sampler.epoch());
        let len = sampler.dataset_len();
        let loader =
            Self::make(dataset, ("sampler", Arc::new(sampler)), (deal, seed, epoch), options, device, collate)?;
        // With Remainder::Uneven, some ranks may have fewer batches than rank 0, or none.
        deal.check_batches(len, &options)?;
        Ok(loader)
    }

    fn make<C>(
        dataset: D,
        (argument, order): (&'static str, Arc<dyn Order>),
        (deal, seed, epoch): (Deal, u64, u64),
        options: LoaderOptions,
        device: Option<&Device>,
        collate: C,
    ) -> Result<Self>
    where
        C: Fn(Vec<D::Sample>) -> Result<T> + Send + Sync + 'static,
    {
        options.check()?;
        if order.dataset_len() != dataset.len() {
            let (expected, found) = (order.dataset_len(), dataset.len());
            let reason = format!("it must be for this dataset of {found} samples, and is for {expected}");
            return Err(Error::invalid(argument, reason));
        }
        Ok(Self {
            dataset: Arc::new(dataset),
            collate: Arc::new(collate),
            order,
            deal,
            seed,
            options,
            device: device.cloned(),
            position: Arc::new(Mutex::new(Position::begin(epoch))),
            restart: Arc::new(Once::new()),
            #[cfg(feature = "cuda")]
            uploader: Mutex::default(),
        })
    }

    /// The loader with batches on `device` instead of the group's.
    pub fn to_device(self, device: &Device) -> Self {
        Self { device: Some(device.clone()), ..self }
    }
}

debug_fields!(<D: Dataset, T> DataLoader<D, T>: |this| options = this.options, device = this.device,
    state = this.state());
