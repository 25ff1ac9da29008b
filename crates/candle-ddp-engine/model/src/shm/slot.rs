//! Payload: one number per slot. Loom fails where a read and a write, or two writes, have no order.
use super::segment::Segment;
use loom::cell::UnsafeCell;
use std::ops::Range;

#[derive(Clone, Copy)]
pub(crate) struct Slot<'a>(&'a UnsafeCell<u32>);

impl<'a> Slot<'a> {
    pub(super) fn new(segment: &'a Segment, range: Range<usize>) -> Self {
        Self(segment.slot(range.start))
    }

    pub(crate) fn write(self, value: u32) {
        // SAFETY: loom panics before this if another thread may access the cell.
        self.0.with_mut(|cell| unsafe { *cell = value });
    }

    pub(crate) fn read(self) -> u32 {
        // SAFETY: as above.
        self.0.with(|cell| unsafe { *cell })
    }
}
