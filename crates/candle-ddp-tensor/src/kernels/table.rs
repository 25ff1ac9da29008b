//! The table that lets one launch process many tensors; `part.cu` reads it.
use super::operands::Scalars;
use crate::{Error, Result};

/// The number of elements that a block processes.
pub(super) const CHUNK: usize = 4096;

/// The addresses of one part's elements, 0 if a kernel does not use them; and the numbers that it needs for them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Entry {
    pub(super) elements: usize,
    pub(super) parameter: u64,
    pub(super) gradient: u64,
    pub(super) states: [u64; 2],
    pub(super) scalars: Scalars,
}

/// The size of `part.cu`'s `Part` in words.
const WORDS: usize = 7;

/// The numbers of the parts, each different set once: `part.cu`'s `Sets`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Sets([Scalars; Self::MOST]);

// SAFETY: numbers without padding, laid out as the kernels expect them.
unsafe impl cudarc::driver::DeviceRepr for Sets {}

impl Sets {
    /// How many different sets a launch takes: with more, its arguments would exceed the 4 KiB that every GPU takes.
    const MOST: usize = 32;

    /// The number of `set` among the `known` ones, of which it becomes one; `None` if a launch takes no more.
    pub(super) fn number_of(known: &mut Vec<Scalars>, set: &Scalars) -> Option<usize> {
        let bits = |set: &Scalars| set.map(f64::to_bits);
        // The last is the likeliest.
        known.iter().rposition(|other| bits(other) == bits(set)).or_else(|| {
            let has_room = known.len() < Self::MOST;
            has_room.then(|| {
                known.push(*set);
                known.len() - 1
            })
        })
    }
}

/// The table, which has one more entry than there are parts, and what kernels need besides.
#[derive(Clone, Debug)]
pub(super) struct Table {
    pub(super) words: Vec<u64>,
    pub(super) sets: Sets,
    pub(super) parts: u32,
    /// The number of blocks needed.
    pub(super) chunks: u32,
}

impl Table {
    pub(super) fn new(entries: &[Entry]) -> Result<Self> {
        let mut words = Vec::with_capacity((entries.len() + 1) * WORDS);
        let mut known = Vec::new();
        let mut first_chunk = 0u64;
        for Entry { elements, parameter, gradient, states: [first, second], scalars } in entries {
            let too_many = || Error::invalid("parameters", "they have too many different sets of numbers");
            let number = Sets::number_of(&mut known, scalars).ok_or_else(too_many)?;
            words.extend([first_chunk, *elements as u64, *parameter, *gradient, *first, *second, number as u64]);
            first_chunk += elements.div_ceil(CHUNK) as u64;
        }
        let mut sets = Sets::default();
        sets.0[..known.len()].copy_from_slice(&known);
        words.push(first_chunk);
        words.resize((entries.len() + 1) * WORDS, 0);
        // The limits of a grid.
        match (u32::try_from(entries.len()), i32::try_from(first_chunk)) {
            (Ok(parts), Ok(chunks)) => Ok(Self { words, sets, parts, chunks: chunks.unsigned_abs() }),
            _ => Err(Error::invalid("parameters", "there are more elements than one kernel launch can process")),
        }
    }
}
