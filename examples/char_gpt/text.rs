//! Windows of a text: the characters that the model sees, and those that follow each of them.
use crate::common::text::read_text;
use crate::vocabulary::Vocabulary;
use candle_core::{Device, Tensor};
use candle_ddp::{Error, Result};
use std::path::Path;

/// The last part of this size is for validation.
const VALIDATION: f64 = 0.1;

pub(crate) struct Text {
    tokens: Vec<u32>,
    context: usize,
    /// From one window's first character to the next one's.
    stride: usize,
}

impl Text {
    /// Reads a text file, or the `.md` files of a folder in the order of their names. Returns the characters,
    /// the windows for training, of which one begins at each character, and those for validation, which do not overlap.
    pub(crate) fn read(path: &Path, context: usize) -> Result<(Vocabulary, Self, Self)> {
        let text = read_text(path)?;
        let vocabulary = Vocabulary::of(&text);
        let tokens = vocabulary.encode(&text)?;
        let (train, validation) = tokens.split_at((tokens.len() as f64 * (1. - VALIDATION)) as usize);
        if validation.len() <= context {
            let (found, needed) = (validation.len(), context + 1);
            let reason = format!("the last tenth of it has {found} characters; a context of {context} needs {needed}");
            return Err(Error::InvalidArgument { argument: "--data", reason });
        }
        let windows = |tokens: &[u32], stride| Self { tokens: tokens.to_vec(), context, stride };
        Ok((vocabulary, windows(train, 1), windows(validation, context)))
    }

    /// Returns the number of windows.
    pub(crate) fn len(&self) -> usize {
        (self.tokens.len() - self.context - 1) / self.stride + 1
    }

    /// Returns the characters u32[B, context] of the given windows, and those that follow each of them.
    pub(crate) fn batch(&self, windows: &[usize]) -> Result<(Tensor, Tensor)> {
        let tokens = |window: &usize, shift| {
            let first = window * self.stride + shift;
            &self.tokens[first..first + self.context]
        };
        let cut = |shift| windows.iter().flat_map(|window| tokens(window, shift)).copied().collect::<Vec<u32>>();
        let tensor = |values| Tensor::from_vec(values, (windows.len(), self.context), &Device::Cpu);
        Ok((tensor(cut(0))?, tensor(cut(1))?))
    }
}
