//! Orders in which ranks read a dataset.
use super::deal::{Deal, Places};
use super::indices::Indices;
use super::options::LoaderOptions;
use candle_ddp_base::debug_fields;
use candle_ddp_state::hash::content_64;
use candle_ddp_state::seed::Generator;
use candle_ddp_state::{Error, Result};
use std::sync::{Arc, OnceLock};

/// The order in which all ranks together read the samples of an epoch: what PyTorch calls a sampler, or a batch sampler if it
/// makes the batches too. [`DataLoader::with_order`](super::DataLoader::with_order) takes one of the program's own.
///
/// An order says nothing of ranks. They take turns in it: of `n` ranks, rank `r` reads the places `r`, `r + n`, `r + 2n` and so on,
/// which are samples, or batches if the order makes them. So no sample goes to two ranks, all ranks have the same number of
/// batches (as [`SamplerOptions::remainder`](super::SamplerOptions::remainder) says), and a run can resume with another number
/// of ranks, whatever the order is.
///
/// ```
/// use candle_ddp::data::{DataLoader, EpochOrder, LoaderOptions, Order};
/// use candle_ddp::seed::Generator;
///
/// /// A curriculum: ever more of the samples, which are sorted from easy to hard.
/// struct Curriculum {
///     samples: usize,
/// }
///
/// impl Order for Curriculum {
///     fn dataset_len(&self) -> usize {
///         self.samples
///     }
///
///     fn epoch_order(&self, seed: u64, epoch: u64) -> candle_ddp::Result<EpochOrder> {
///         let mut random = Generator::with_sequence(seed, epoch);
///         let easy = self.samples * (epoch as usize + 1).min(4) / 4;
///         Ok((0..easy).map(|_| random.below(easy as u64) as usize).collect())
///     }
/// }
///
/// # candle_ddp::spawn(2, |pg| {
/// let options = LoaderOptions { batch_size: 5, ..Default::default() };
/// let loader = DataLoader::with_order(0..80, Curriculum { samples: 80 }, &pg, options, Ok)?;
/// assert_eq!([loader.epoch(0).len(), loader.epoch(3).len()], [2, 8]);
/// # Ok(())
/// # })?;
/// # Ok::<(), candle_ddp::Error>(())
/// ```
pub trait Order: Send + Sync {
    /// The number of samples that the dataset has.
    fn dataset_len(&self) -> usize;

    /// The order of epoch `epoch`. It must follow from `seed`, `epoch` and the order itself alone: every rank asks for it, also one
    /// that resumes. It may have any number of samples, and a sample any number of times.
    ///
    /// # Errors
    /// Whatever keeps it from being made. The loader returns the error in place of the epoch's first batch.
    fn epoch_order(&self, seed: u64, epoch: u64) -> Result<EpochOrder>;
}

impl<O: Order + ?Sized> Order for Arc<O> {
    fn dataset_len(&self) -> usize {
        (**self).dataset_len()
    }

    fn epoch_order(&self, seed: u64, epoch: u64) -> Result<EpochOrder> {
        (**self).epoch_order(seed, epoch)
    }
}

/// The samples of one epoch, of all ranks, in their order: what an [`Order`] makes. It is collected from indices, of which the
/// loader makes batches of [`LoaderOptions::batch_size`], or [made of batches](Self::of_batches).
pub struct EpochOrder {
    indices: Indices,
    /// Where each batch ends, if the order makes them.
    ends: Option<Vec<usize>>,
    fingerprint: OnceLock<u64>,
}

impl EpochOrder {
    pub(super) fn new(indices: Indices) -> Self {
        Self { indices, ends: None, fingerprint: OnceLock::new() }
    }

    /// An order of whole batches. They may differ in length, but none may be empty. The loader's
    /// [`batch_size`](LoaderOptions::batch_size) must then be 1, the default.
    pub fn of_batches<B: IntoIterator<Item = usize>>(batches: impl IntoIterator<Item = B>) -> Self {
        let (mut ends, mut end) = (Vec::new(), 0);
        let indices = batches.into_iter().flat_map(|batch| {
            // Collected, since the end must be known before the next batch begins.
            let batch: Vec<usize> = batch.into_iter().collect();
            end += batch.len();
            ends.push(end);
            batch
        });
        let indices = indices.collect();
        Self { ends: Some(ends), ..Self::new(indices) }
    }

    /// The number of samples that all ranks get together, without padding.
    pub fn len(&self) -> usize {
        self.indices.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number of batches that the order makes; none if that is left to the loader.
    pub fn num_batches(&self) -> Option<usize> {
        self.ends.as_ref().map(Vec::len)
    }

    /// The number of places that the ranks take turns in.
    pub(super) fn places(&self) -> usize {
        self.num_batches().unwrap_or(self.len())
    }

    /// The number of samples that are in the first `places` places.
    pub(super) fn samples(&self, places: usize) -> usize {
        match &self.ends {
            Some(ends) => places.checked_sub(1).and_then(|last| ends.get(last)).copied().unwrap_or(0),
            None => places,
        }
    }

    /// The number of places that the first `samples` samples take. None if they end within a batch.
    pub(super) fn places_of(&self, samples: usize) -> Option<usize> {
        match &self.ends {
            Some(_) if samples == 0 => Some(0),
            Some(ends) => ends.binary_search(&samples).ok().map(|last| last + 1),
            None => (samples <= self.len()).then_some(samples),
        }
    }

    /// A hash of the order, never 0.
    pub(super) fn fingerprint(&self) -> u64 {
        *self.fingerprint.get_or_init(|| {
            let ends = self.ends.iter().flatten().map(|end| *end as u64).collect::<Vec<_>>();
            let hash = self.indices.fingerprint().rotate_left(1) ^ content_64(bytemuck::cast_slice(&ends));
            hash.max(1)
        })
    }

    /// Whether a loader with these options can deal it out.
    pub(super) fn check(&self, dataset_len: usize, deal: &Deal, options: &LoaderOptions) -> Result<()> {
        if self.is_empty() {
            return Err(Error::invalid("order", "an epoch must have at least one sample, and this one has none"));
        }
        let last = self.indices.bound() - 1;
        if last >= dataset_len {
            let reason = format!(
                "its indices must be below {dataset_len}, the length of the dataset, but it has the index {last}"
            );
            return Err(Error::invalid("order", reason));
        }
        if let Some(ends) = &self.ends {
            let begins = [0].into_iter().chain(ends.iter().copied());
            if let Some(empty) = begins.zip(ends).position(|(begin, end)| begin == *end) {
                let reason = format!("its batches must have at least one sample each, but batch {empty} has none");
                return Err(Error::invalid("order", reason));
            }
            if options.batch_size != 1 || options.drop_last {
                let LoaderOptions { batch_size, drop_last, .. } = options;
                let reason = format!(
                    "the order makes the batches itself, so batch_size must be 1 and drop_last false (the defaults), not \
                     {batch_size} and {drop_last}"
                );
                return Err(Error::invalid("batch_size", reason));
            }
        }
        deal.check(self.places(), "epoch", if self.ends.is_some() { "batch(es)" } else { "sample(s)" })?;
        deal.check_batches(self.places(), options)
    }
}

/// The order of these indices.
impl FromIterator<usize> for EpochOrder {
    fn from_iter<I: IntoIterator<Item = usize>>(indices: I) -> Self {
        Self::new(indices.into_iter().collect())
    }
}

debug_fields!(EpochOrder: |this| samples = this.len(), batches = this.num_batches());

/// The generator of an epoch of the orders of this name. Augmentation draws from the seed itself.
pub(super) fn generator(name: [u8; 8], seed: u64, epoch: u64) -> Generator {
    Generator::with_sequence(seed ^ u64::from_be_bytes(name), epoch)
}

/// Fisher and Yates's shuffle.
pub(super) fn shuffle<T>(items: &mut [T], random: &mut Generator) {
    for left in (2..=items.len()).rev() {
        items.swap(left - 1, random.below(left as u64) as usize);
    }
}

/// The batches of one rank, as indices of samples.
#[derive(Clone)]
pub(super) struct Batches {
    order: Arc<EpochOrder>,
    places: Places,
    options: LoaderOptions,
}

impl Batches {
    /// The batches after the first `consumed` places, which all ranks have consumed.
    pub(super) fn new(order: Arc<EpochOrder>, consumed: usize, deal: &Deal, options: LoaderOptions) -> Self {
        let places = deal.places_after(order.places(), consumed);
        Self { order, places, options }
    }

    /// How many there are still.
    pub(super) fn len(&self) -> usize {
        self.options.num_batches(self.places.len())
    }

    /// The number of samples that are in them, at most.
    pub(super) fn samples_left(&self) -> usize {
        if self.order.ends.is_some() { self.order.len() } else { self.places.len() }
    }

    /// Takes the next one, and returns its samples without padding.
    pub(super) fn next_without_padding(&mut self) -> Vec<usize> {
        let mut indices = Vec::new();
        match self.order.ends.is_some() {
            // Such a batch is padding as a whole.
            true => {
                let is_padding = self.places.before_padding(1) == 0;
                self.next_into(&mut indices);
                indices.truncate(if is_padding { 0 } else { indices.len() });
            }
            false => {
                let count = self.places.before_padding(self.options.batch_size);
                self.next_into(&mut indices);
                indices.truncate(count);
            }
        }
        indices
    }

    /// Takes the next one into `indices`. Returns whether there was one.
    pub(super) fn next_into(&mut self, indices: &mut Vec<usize>) -> bool {
        indices.clear();
        let samples = &self.order.indices;
        match &self.order.ends {
            Some(ends) => {
                let Some(batch) = self.places.next() else { return false };
                let begin = if batch == 0 { 0 } else { ends[batch - 1] };
                indices.extend((begin..ends[batch]).filter_map(|place| samples.get(place)));
            }
            None => {
                let places = self.places.by_ref().take(self.options.batch_size);
                indices.extend(places.filter_map(|place| samples.get(place)));
            }
        }
        if self.options.drop_last { indices.len() == self.options.batch_size } else { !indices.is_empty() }
    }
}
