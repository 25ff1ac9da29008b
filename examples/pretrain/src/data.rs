//! Samples of files of tokens: windows of equal length, or documents that share rows.
use crate::tokens::{Format, TokenFile, broken};
use candle_core::{Device, Tensor};
use candle_ddp::data::{
    Batch, DataLoader, Dataset, LengthBatches, LoaderOptions, Packed, Remainder, SamplerOptions, pack,
};
use candle_ddp::seed::Generator;
use candle_ddp::{Error, ProcessGroup, Result};
use std::ops::Range;
use std::path::Path;

/// How many rows `LengthBatches::packed` fills at a time.
const PACKING_WINDOW: usize = 32;

/// How files are cut into samples.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    /// Tokens must be below this.
    pub vocabulary: usize,
    /// The number of tokens that the model sees.
    pub context: usize,
    /// The token that ends a document, if samples are documents.
    pub end_of_text: Option<u32>,
}

/// Samples of some files, each of which is some successive tokens of one file.
#[derive(Debug)]
pub struct Tokens {
    files: Vec<TokenFile>,
    vocabulary: usize,
    samples: Samples,
}

#[derive(Debug)]
enum Samples {
    /// Windows of `context` + 1 tokens, each of which begins with the last token of the one before. `ends` is the number of windows up to
    /// the end of each file.
    Windows { context: usize, ends: Vec<usize> },
    /// The number of the file, and places in it.
    Documents(Vec<(u32, Range<usize>)>),
}

impl Tokens {
    /// Opens the files. `argument` is the option that names them.
    ///
    /// # Errors
    /// The errors of [`TokenFile::open`]; [`Error::Io`] for a file that is too short for a window; [`Error::InvalidArgument`] if there is
    /// no file, or no document of two tokens.
    pub fn open<P: AsRef<Path>>(argument: &'static str, files: &[(P, Format)], cut: Cut) -> Result<Self> {
        if files.is_empty() {
            return Err(Error::invalid(argument, "it must name at least one file"));
        }
        let open = |(path, format): &(P, Format)| TokenFile::open(path.as_ref(), *format);
        let files = files.iter().map(open).collect::<Result<Vec<_>>>()?;
        let samples = match cut.end_of_text {
            None => Samples::windows(&files, cut.context)?,
            Some(end_of_text) => Samples::documents(&files, cut.context, end_of_text)?,
        };
        let tokens = Self { files, vocabulary: cut.vocabulary, samples };
        match tokens.is_empty() {
            true => Err(Error::invalid(argument, "its files must have a document of at least two tokens")),
            false => Ok(tokens),
        }
    }

    /// The number of tokens of all files.
    pub fn count(&self) -> usize {
        self.files.iter().map(TokenFile::len).sum()
    }

    /// A loader of this rank's part. Rows of documents have as many tokens as a batch of windows.
    ///
    /// # Errors
    /// The errors of [`DataLoader::with_order`].
    pub fn loader(self, pg: &ProcessGroup, options: Loading) -> Result<DataLoader<Self, TokenBatch>> {
        let Loading { batch_size, context, workers, seed, is_training, is_in_step } = options;
        // The same number of batches for all ranks, or each sample once.
        let remainder = if is_training || is_in_step { Remainder::Pad } else { Remainder::Uneven };
        let sampler = SamplerOptions { seed, remainder, ..Default::default() };
        let loading = LoaderOptions { num_workers: workers, sampler, ..Default::default() };
        match &self.samples {
            Samples::Windows { .. } => {
                let sampler = SamplerOptions { shuffle: is_training, ..sampler };
                DataLoader::with_collate(self, pg, LoaderOptions { batch_size, sampler, ..loading }, windows)
            }
            Samples::Documents(documents) => {
                let lengths = documents.iter().map(|(_, places)| places.end - places.start);
                let order = LengthBatches::packed(lengths, batch_size * context, PACKING_WINDOW)?;
                DataLoader::with_order(self, order, pg, loading, |row| Ok(TokenBatch::Row(pack(row)?)))
            }
        }
    }
}

/// How a loader reads [`Tokens`].
#[derive(Clone, Copy, Debug)]
pub struct Loading {
    pub batch_size: usize,
    pub context: usize,
    pub workers: usize,
    pub seed: u64,
    /// The samples are shuffled in each epoch.
    pub is_training: bool,
    /// All ranks must have the same number of batches, because the model's blocks are gathered for each.
    pub is_in_step: bool,
}

impl Samples {
    fn windows(files: &[TokenFile], context: usize) -> Result<Self> {
        let mut end = 0;
        let ends = files.iter().map(|file| {
            end += (file.len() - 1) / context;
            if file.len() <= context {
                let reason = format!("it must have more tokens than the context, {context}, but it has {}", file.len());
                return Err(broken(file.path(), &reason));
            }
            Ok(end)
        });
        Ok(Self::Windows { context, ends: ends.collect::<Result<_>>()? })
    }

    /// Documents with their last token, `end_of_text`. Those that are longer than the context are cut; a single token predicts nothing.
    fn documents(files: &[TokenFile], context: usize, end_of_text: u32) -> Result<Self> {
        let mut documents = Vec::new();
        for (number, file) in (0..).zip(files) {
            let mut begin = 0;
            let mut end_at = |end: usize| {
                let pieces = (begin..end).step_by(context).map(|first| first..end.min(first + context));
                documents.extend(pieces.filter(|piece| piece.end - piece.start > 1).map(|piece| (number, piece)));
                begin = end;
            };
            let all = file.all(0..file.len())?.enumerate();
            all.filter(|(_, token)| *token == end_of_text).for_each(|(place, _)| end_at(place + 1));
            end_at(file.len());
        }
        Ok(Self::Documents(documents))
    }
}

impl Dataset for Tokens {
    type Sample = Vec<u32>;

    fn len(&self) -> usize {
        match &self.samples {
            Samples::Windows { ends, .. } => ends.last().copied().unwrap_or(0),
            Samples::Documents(documents) => documents.len(),
        }
    }

    fn get(&self, index: usize, _: &mut Generator) -> Result<Vec<u32>> {
        let (file, places) = match &self.samples {
            Samples::Windows { context, ends } => {
                let file = ends.partition_point(|end| *end <= index);
                let before = file.checked_sub(1).map_or(0, |before| ends[before]);
                let begin = (index - before) * context;
                (file, begin..begin + context + 1)
            }
            Samples::Documents(documents) => {
                let (file, places) = &documents[index];
                (*file as usize, places.clone())
            }
        };
        self.files[file].read(places, self.vocabulary)
    }
}

/// The input of the model.
#[derive(Debug, Clone)]
pub enum TokenBatch {
    /// Tokens u32\[B, T\], and those that follow each of them.
    Windows(Tensor, Tensor),
    Row(Packed),
}

impl TokenBatch {
    /// The number of tokens that it has a loss of.
    pub fn count(&self) -> usize {
        match self {
            Self::Windows(tokens, _) => tokens.elem_count(),
            // Each document has at least two tokens, and no loss of the last.
            Self::Row(row) => row.tokens.elem_count() + 1 - row.cu_seq.elem_count(),
        }
    }
}

impl Batch for TokenBatch {
    fn map_tensors(self, f: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(match self {
            Self::Windows(tokens, next) => Self::Windows(f(tokens)?, f(next)?),
            Self::Row(row) => Self::Row(row.map_tensors(f)?),
        })
    }
}

fn windows(windows: Vec<Vec<u32>>) -> Result<TokenBatch> {
    let (count, context) = (windows.len(), windows[0].len() - 1);
    let part = |shift: usize| {
        let tokens = windows.iter().flat_map(|window| &window[shift..shift + context]).copied().collect::<Vec<_>>();
        Tensor::from_vec(tokens, (count, context), &Device::Cpu)
    };
    Ok(TokenBatch::Windows(part(0)?, part(1)?))
}
