//! Batches of samples of similar length, or of samples that share a row, with as many tokens each.
use super::order::{generator, shuffle};
use super::{EpochOrder, Order};
use candle_ddp_base::debug_fields;
use candle_ddp_state::seed::Generator;
use candle_ddp_state::{Error, Result};
use std::cmp::Reverse;
use std::sync::Arc;

/// How [`LengthBatches`] makes batches.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LengthOptions {
    /// The most samples of a batch. Default: no limit but the tokens.
    pub max_samples: usize,
    /// By how much samples that come into one batch may differ in length for the sake of chance, as a share of their length: each
    /// epoch multiplies each length by a random number from 1 to 1 + `noise` before it sorts. With 0, samples of
    /// equal length alone change their batches from epoch to epoch. Default: 0.1.
    pub noise: f64,
}

impl Default for LengthOptions {
    fn default() -> Self {
        Self { max_samples: usize::MAX, noise: 0.1 }
    }
}

/// Batches of samples of similar length, such as sentences, that have about the same number of tokens with their padding. So little
/// is padded, and no rank waits for another: at each step, all ranks have about as much to do, and all have the same number of
/// steps. It makes the batches itself, so the loader's `batch_size` must be 1; `collate` must pad the samples to the longest.
///
/// Each epoch has other batches, in a random order, and may have some more or fewer of them. A batch has as many samples
/// as fit into `max_tokens`; so if a loss is a mean over samples or tokens, small batches weigh as much as large ones.
/// `Backward::count` is the mean over all of a step's samples or tokens.
///
/// Where samples can share a row, as the documents of a language model can, [`packed`](Self::packed) needs no padding at all.
///
/// ```
/// use candle_ddp::data::{DataLoader, LengthBatches, LoaderOptions};
///
/// let sentences: Vec<Vec<u32>> = (0..1000).map(|i| vec![7; 5 + i * i % 97]).collect();
/// // 512 tokens in each batch.
/// let order = LengthBatches::new(sentences.iter().map(Vec::len), 512)?;
/// # candle_ddp::spawn(2, |pg| {
/// # let (sentences, order) = (sentences.clone(), order.clone());
/// let padded = |batch: &[usize]| batch.iter().map(|i| sentences[*i].len()).max().unwrap_or(0) * batch.len();
/// let loader = DataLoader::with_order(0..1000, order, &pg, LoaderOptions::default(), Ok)?;
/// for batch in &loader {
///     assert!(padded(&batch?) <= 512);
/// }
/// # Ok(())
/// # })?;
/// # Ok::<(), candle_ddp::Error>(())
/// ```
#[derive(Clone)]
pub struct LengthBatches {
    lengths: Arc<[u32]>,
    max_tokens: usize,
    kind: Kind,
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    Similar(LengthOptions),
    /// With a window of so many batches.
    Packed(usize),
}

impl LengthBatches {
    /// Batches of samples of these lengths: sample `i` of the dataset has the `i`-th. The longest of a batch times its number of
    /// samples is at most `max_tokens`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is no length, if one is 0, is above `max_tokens`, or does not fit in 32 bits.
    pub fn new(lengths: impl IntoIterator<Item = usize>, max_tokens: usize) -> Result<Self> {
        Self::with_options(lengths, max_tokens, LengthOptions::default())
    }

    /// Like [`new`](Self::new), with options.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new), and [`Error::InvalidArgument`] if `max_samples` is 0 or `noise` is negative, NaN or infinite.
    pub fn with_options(
        lengths: impl IntoIterator<Item = usize>,
        max_tokens: usize,
        options: LengthOptions,
    ) -> Result<Self> {
        let LengthOptions { max_samples, noise } = options;
        if max_samples == 0 {
            return Err(Error::invalid("max_samples", "it must be at least 1, not 0"));
        }
        if !(noise.is_finite() && noise >= 0.) {
            let reason = format!("it must be a finite number that is not negative, not {noise}");
            return Err(Error::invalid("noise", reason));
        }
        Self::checked(lengths, max_tokens, Kind::Similar(options))
    }

    /// Batches of samples that share one row of at most `max_tokens` tokens, as [`pack`](super::pack()) puts them there: the sum of their
    /// lengths is at most `max_tokens`, and close to it.
    ///
    /// Each epoch shuffles the samples, and takes as many as have the tokens of `window` batches at a time. From the longest to the
    /// shortest, each goes into the first row of the window that has room for it; the emptiest row waits for the next window. With more
    /// batches in a window, fewer tokens of a row remain free; with 32, it is less than a hundredth, unless most samples are long. With 1, rows have
    /// the samples in the order of the shuffle.
    ///
    /// ```
    /// use candle_ddp::data::{DataLoader, LengthBatches, LoaderOptions, pack};
    ///
    /// let documents: Vec<Vec<u32>> = (0..1000).map(|i| vec![7; 5 + i * i % 97]).collect();
    /// let order = LengthBatches::packed(documents.iter().map(Vec::len), 512, 32)?;
    /// # candle_ddp::spawn(2, |pg| {
    /// # let (documents, order) = (documents.clone(), order.clone());
    /// let find = move |batch: Vec<usize>| pack(batch.iter().map(|i| documents[*i].as_slice()));
    /// for row in &DataLoader::with_order(0..1000, order, &pg, LoaderOptions::default(), find)? {
    ///     assert!(row?.tokens.elem_count() <= 512);
    /// }
    /// # Ok(())
    /// # })?;
    /// # Ok::<(), candle_ddp::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`new`](Self::new), and [`Error::InvalidArgument`] if `window` is 0.
    pub fn packed(lengths: impl IntoIterator<Item = usize>, max_tokens: usize, window: usize) -> Result<Self> {
        if window == 0 {
            return Err(Error::invalid("window", "it must be at least 1 batch, not 0"));
        }
        Self::checked(lengths, max_tokens, Kind::Packed(window))
    }

    fn checked(lengths: impl IntoIterator<Item = usize>, max_tokens: usize, kind: Kind) -> Result<Self> {
        let checked = |(index, length): (usize, usize)| match u32::try_from(length) {
            Ok(fitting) if length > 0 && length <= max_tokens => Ok(fitting),
            _ => {
                let reason = format!(
                    "each must be from 1 to max_tokens = {max_tokens}, and below 2³², but that of sample {index} is {length}: \
                     raise max_tokens, or cut or leave out such samples"
                );
                Err(Error::invalid("lengths", reason))
            }
        };
        let lengths = lengths.into_iter().enumerate().map(checked).collect::<Result<Arc<[u32]>>>()?;
        if lengths.is_empty() {
            return Err(Error::invalid("lengths", "there must be at least one sample"));
        }
        Ok(Self { lengths, max_tokens, kind })
    }

    fn similar(&self, options: LengthOptions, random: &mut Generator) -> Vec<Vec<usize>> {
        let key = |(index, length): (usize, &u32)| {
            let factor = 1. + options.noise * random.uniform(0., 1.);
            // The random bits decide between equal lengths, as chance and not as the index does.
            (f64::from(*length) * factor, random.next_u64(), index)
        };
        let mut sorted: Vec<_> = self.lengths.iter().enumerate().map(key).collect();
        // The longest come first, so that the one batch that is not full is of short samples.
        sorted.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)).then(a.2.cmp(&b.2)));
        let (mut batches, mut batch, mut longest) = (Vec::new(), Vec::new(), 0);
        for (_, _, index) in sorted {
            let length = self.lengths[index] as usize;
            let tokens = longest.max(length).saturating_mul(batch.len() + 1);
            if !batch.is_empty() && (tokens > self.max_tokens || batch.len() == options.max_samples) {
                batches.push(std::mem::take(&mut batch));
                longest = 0;
            }
            longest = longest.max(length);
            batch.push(index);
        }
        batches.push(batch);
        batches
    }

    fn rows(&self, window: usize, random: &mut Generator) -> Vec<Vec<usize>> {
        let mut samples: Vec<usize> = (0..self.lengths.len()).collect();
        shuffle(&mut samples, random);
        let room = self.max_tokens.saturating_mul(window);
        let (mut rows, mut waiting, mut tokens) = (Vec::new(), Vec::new(), 0usize);
        for index in samples {
            let length = self.lengths[index] as usize;
            if !waiting.is_empty() && tokens.saturating_add(length) > room {
                let mut full = self.first_fit(std::mem::take(&mut waiting));
                tokens = 0;
                if let Some(emptiest) = (0..full.len()).skip(1).max_by_key(|row| full[*row].0) {
                    let (free, row) = full.swap_remove(emptiest);
                    (waiting, tokens) = (row, self.max_tokens - free);
                }
                rows.extend(full);
            }
            waiting.push(index);
            tokens = tokens.saturating_add(length);
        }
        rows.extend(self.first_fit(waiting));
        rows.into_iter().map(|(_, row)| row).collect()
    }

    /// Rows of these samples, and how many tokens are free in each.
    fn first_fit(&self, mut samples: Vec<usize>) -> Vec<(usize, Vec<usize>)> {
        samples.sort_by_key(|index| Reverse(self.lengths[*index]));
        let mut rows: Vec<(usize, Vec<usize>)> = Vec::new();
        for index in samples {
            let length = self.lengths[index] as usize;
            match rows.iter_mut().find(|(free, _)| *free >= length) {
                Some((free, row)) => {
                    *free -= length;
                    row.push(index);
                }
                None => rows.push((self.max_tokens - length, vec![index])),
            }
        }
        rows
    }
}

impl Order for LengthBatches {
    fn dataset_len(&self) -> usize {
        self.lengths.len()
    }

    fn epoch_order(&self, seed: u64, epoch: u64) -> Result<EpochOrder> {
        let mut random = generator(*b"lengths!", seed, epoch);
        let mut batches = match self.kind {
            Kind::Similar(options) => self.similar(options, &mut random),
            Kind::Packed(window) => self.rows(window, &mut random),
        };
        shuffle(&mut batches, &mut random);
        Ok(EpochOrder::of_batches(batches))
    }
}

debug_fields!(LengthBatches: |this| samples = this.lengths.len(), max_tokens = this.max_tokens, kind = this.kind);
