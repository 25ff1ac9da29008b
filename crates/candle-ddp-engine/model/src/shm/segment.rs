//! A rank's memory: the words and slots that its layout names.
use super::layout::{Layout, Sleeper};
use super::sync::AtomicU32;
use crate::call::Header;
use loom::cell::UnsafeCell;
use std::collections::BTreeMap;

pub(super) struct Segment {
    words: BTreeMap<usize, AtomicU32>,
    slots: BTreeMap<usize, UnsafeCell<u32>>,
}

// SAFETY: loom tracks every access to a cell, runs one thread at a time, and panics before an access that has no order.
unsafe impl Sync for Segment {}
// SAFETY: as above.
unsafe impl Send for Segment {}

impl Segment {
    /// The part for the collectives.
    pub(super) fn new(layout: &Layout) -> Self {
        let eventcount = layout.eventcount(Sleeper::Collectives);
        let passed = (0..layout.ranks).map(|peer| layout.passed(peer));
        let positions = 0..layout.slots as u32;
        let lines = positions.clone().flat_map(|position| {
            (0..=Header::BYTES).step_by(4).map(move |offset| layout.ring().line(position) + offset)
        });
        let words = [eventcount, eventcount + 4].into_iter().chain(passed).chain(lines);
        let slots = positions.map(|position| layout.ring().slot(position).start);
        Self {
            words: words.map(|offset| (offset, AtomicU32::new(0))).collect(),
            slots: slots.map(|start| (start, UnsafeCell::new(0))).collect(),
        }
    }

    pub(super) fn word(&self, offset: usize) -> &AtomicU32 {
        &self.words[&offset]
    }

    pub(super) fn slot(&self, start: usize) -> &UnsafeCell<u32> {
        &self.slots[&start]
    }
}
