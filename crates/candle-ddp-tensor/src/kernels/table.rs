//! The table that lets one launch process many tensors; `part.cu` reads it.
use super::operands::Scalars;
use crate::{Error, Result};

/// The number of elements that a block processes.
pub const CHUNK: usize = 4096;
/// The number of threads in a block.
pub const THREADS: u32 = 256;

/// The addresses of one part's elements; 0 if a kernel does not use them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Entry {
    pub elements: usize,
    pub parameter: u64,
    pub gradient: u64,
    pub states: [u64; 2],
    pub scalars: Scalars,
}

/// The size of `part.cu`'s `Part` in words.
const WORDS: usize = 18;

/// The table, which has one more entry than there are parts.
#[derive(Clone, Debug)]
pub struct Table {
    pub words: Vec<u64>,
    pub parts: u32,
    /// The number of blocks needed.
    pub chunks: u32,
}

impl Table {
    pub fn new(entries: &[Entry]) -> Result<Self> {
        let mut words = Vec::with_capacity((entries.len() + 1) * WORDS);
        let mut first_chunk = 0u64;
        for Entry { elements, parameter, gradient, states: [first, second], scalars } in entries {
            words.extend([first_chunk, *elements as u64, *parameter, *gradient, *first, *second]);
            words.extend(scalars.map(f64::to_bits));
            first_chunk += elements.div_ceil(CHUNK) as u64;
        }
        words.push(first_chunk);
        words.resize((entries.len() + 1) * WORDS, 0);
        // The limits of a grid.
        match (u32::try_from(entries.len()), i32::try_from(first_chunk)) {
            (Ok(parts), Ok(chunks)) => Ok(Self { words, parts, chunks: chunks.unsigned_abs() }),
            _ => Err(Error::invalid("parameters", "there are more elements than one kernel launch can process")),
        }
    }
}
