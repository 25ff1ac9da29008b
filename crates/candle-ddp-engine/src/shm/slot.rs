//! Payload in shared memory.
use super::segment::Segment;
use crate::memory::Region;
use crate::transport_error::TransportError;
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;

/// Bytes in shared memory, which are only ever copied in and out.
///
/// There is never a reference to them. Writer and readers take turns (see `stream.rs`), but this process's soundness
/// cannot rely on other processes: a peer that breaks the protocol only makes the values that are read meaningless,
/// since no decision depends on them.
#[derive(Clone, Copy)]
pub(crate) struct Slot<'a> {
    start: NonNull<u8>,
    length: usize,
    segment: PhantomData<&'a Segment>,
}

impl<'a> Slot<'a> {
    pub(super) fn new(segment: &'a Segment, range: Range<usize>) -> Self {
        Self { start: segment.bytes(range.start, range.len()), length: range.len(), segment: PhantomData }
    }

    pub(crate) fn part(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.length, "{range:?} of a slot of {} bytes", self.length);
        // SAFETY: within the slot.
        Self { start: unsafe { self.start.add(range.start) }, length: range.len(), segment: PhantomData }
    }

    pub(super) fn len(self) -> usize {
        self.length
    }

    pub(super) fn as_ptr(self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Copies `bytes` to the start of the slot.
    pub(crate) fn write(self, bytes: &[u8]) {
        assert!(bytes.len() <= self.length);
        // SAFETY: `bytes` and the slot are long enough; private memory and a mapping do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.as_ptr(), bytes.len()) }
    }

    /// Copies the start of the slot to `bytes`.
    pub(crate) fn read(self, bytes: &mut [u8]) {
        assert!(bytes.len() <= self.length);
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy_nonoverlapping(self.as_ptr(), bytes.as_mut_ptr(), bytes.len()) }
    }

    /// Copies a part of a tensor to the start of the slot.
    pub(crate) fn write_from(self, part: Region) -> Result<(), TransportError> {
        part.read(|bytes| self.write(bytes))
    }

    /// Copies the start of the slot to a part of a tensor.
    pub(crate) fn read_into(self, part: Region) -> Result<(), TransportError> {
        part.write(|bytes| self.read(bytes))
    }
}
