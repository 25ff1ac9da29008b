//! The words of a text, in columns that are read side by side.
use candle_core::{Device, Tensor};
use candle_ddp::{Error, Result};
use std::collections::HashMap;

/// The last part of this size is for validation.
const VALIDATION: f64 = 0.1;

/// The number of each word, in the order of their first appearance. A line ends with a word that stands for its end.
pub(crate) struct Corpus {
    pub(crate) vocabulary: usize,
    pub(crate) train: Vec<u32>,
    pub(crate) validation: Vec<u32>,
}

impl Corpus {
    pub(crate) fn of(text: &str) -> Self {
        let mut numbers = HashMap::new();
        let words = text.lines().flat_map(|line| line.split_whitespace().chain(["<eos>"]));
        let mut train: Vec<u32> = words
            .map(|word| {
                let next = numbers.len() as u32;
                *numbers.entry(word).or_insert(next)
            })
            .collect();
        let validation = train.split_off((train.len() as f64 * (1. - VALIDATION)) as usize);
        Self { vocabulary: numbers.len(), train, validation }
    }
}

/// This rank's part of the columns into which a text is cut.
pub(crate) struct Columns {
    columns: Vec<Vec<u32>>,
    bptt: usize,
}

impl Columns {
    /// Cuts `words` into `batch_size` columns of the same length, of which each of `world_size` ranks gets as many. What is left over is
    /// not used.
    pub(crate) fn new(
        words: &[u32],
        batch_size: usize,
        bptt: usize,
        (rank, world_size): (usize, usize),
    ) -> Result<Self> {
        let length = words.len() / batch_size;
        if length < 2 {
            let reason = format!("a part of it has {} words: each of {batch_size} columns needs two", words.len());
            return Err(Error::InvalidArgument { argument: "--data", reason });
        }
        let own = batch_size / world_size;
        let columns = words.chunks_exact(length).skip(rank * own).take(own).map(<[u32]>::to_vec).collect();
        Ok(Self { columns, bptt })
    }

    /// The words u32[T, B] of each step, at most `bptt` of each column, and those that follow them.
    pub(crate) fn batches(&self) -> impl ExactSizeIterator<Item = Result<(Tensor, Tensor)>> {
        let last = self.columns[0].len() - 1;
        (0..last.div_ceil(self.bptt)).map(move |index| {
            let (start, end) = (index * self.bptt, last.min((index + 1) * self.bptt));
            let rows = |shift: usize| {
                let row = move |step: usize| self.columns.iter().map(move |column| column[step + shift]);
                Tensor::from_iter((start..end).flat_map(row), &Device::Cpu)?.reshape((end - start, self.columns.len()))
            };
            Ok((rows(0)?, rows(1)?))
        })
    }
}
