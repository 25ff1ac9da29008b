//! What a call works on: the memory of its tensors.
use crate::memory::{Locking, Memory, Region};
use std::ops::Range;

/// Some bytes of a [`Memory`].
#[derive(Clone, Copy)]
pub struct Slice<'a> {
    memory: &'a dyn Memory,
    start: usize,
    end: usize,
}

impl<'a> Slice<'a> {
    /// The bytes `range` of `memory`.
    pub fn new(memory: &'a dyn Memory, range: Range<usize>) -> Self {
        Self { memory, start: range.start, end: range.end }
    }

    pub(crate) fn region(self, locking: Locking<'a>) -> Region<'a> {
        Region::new(self.memory, self.start..self.end, locking)
    }
}

impl std::fmt::Debug for Slice<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} at {:#x}", self.start..self.end, self.memory.address())
    }
}

/// The bytes of a call. Their lengths must be those that [`Call`](crate::Call) describes: callers check them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Operands<'a> {
    /// What the call changes; for a call on one tensor that is not a [send](crate::Operation::Send), its tensor.
    pub output: Option<Slice<'a>>,
    /// What the call only reads.
    pub input: Option<Slice<'a>>,
}

/// The tensors of a call that is queued. Dropping it releases them.
pub trait Tensors: Send {
    /// Calls `work` with the tensors' bytes.
    fn with(&self, work: &mut dyn FnMut(Operands));
}
