//! The table by which one launch works on many tensors: `part.cu` reads it.
use super::operands::Scalars;
use crate::{Error, Result};

/// How many elements a block works on.
pub(super) const CHUNK: usize = 4096;
/// How many threads a block has.
pub(super) const THREADS: u32 = 256;

/// Where the elements of one part are; 0 where a kernel does without.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Entry {
    pub(super) elements: usize,
    pub(super) parameter: u64,
    pub(super) gradient: u64,
    pub(super) states: [u64; 2],
    pub(super) scalars: Scalars,
}

/// A `Part` of `part.cu`, as numbers.
const WORDS: usize = 18;

/// The table, with one entry more than there are parts.
#[derive(Clone, Debug)]
pub(super) struct Table {
    pub(super) words: Vec<u64>,
    pub(super) parts: u32,
    /// How many blocks it takes.
    pub(super) chunks: u32,
}

impl Table {
    pub(super) fn new(entries: &[Entry]) -> Result<Self> {
        let mut words = Vec::with_capacity((entries.len() + 1) * WORDS);
        let mut first_chunk = 0u64;
        for Entry { elements, parameter, gradient, states: [first, second], scalars } in entries {
            words.extend([first_chunk, *elements as u64, *parameter, *gradient, *first, *second]);
            words.extend(scalars.map(f64::to_bits));
            first_chunk += elements.div_ceil(CHUNK) as u64;
        }
        words.push(first_chunk);
        words.resize((entries.len() + 1) * WORDS, 0);
        // What a grid can have.
        match (u32::try_from(entries.len()), i32::try_from(first_chunk)) {
            (Ok(parts), Ok(chunks)) => Ok(Self { words, parts, chunks: chunks.unsigned_abs() }),
            _ => Err(Error::invalid("parameters", "there are more elements than one launch of a kernel can work on")),
        }
    }
}
