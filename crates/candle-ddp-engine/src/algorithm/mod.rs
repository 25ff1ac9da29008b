//! The algorithms of each collective over each data path.
//!
//! All algorithms work on the bytes of the tensors, whose storages they lock only while bytes move. Their schedules
//! depend only on the call, the world size and the [`Tuning`], which are the same on all ranks. Reductions always take
//! the ranks in order.
mod dispatch;
mod flat;
mod hierarchical;
mod shm;

pub(super) use dispatch::dispatch;
pub(super) use flat::Flat;
pub(super) use hierarchical::Hierarchical;
pub(super) use shm::Shm;

use super::memory::Region;
use super::shm::Layout;
use super::transport_error::TransportError;
use std::ops::Range;

/// Sizes that choose between algorithms. `scripts/compare_settings.py`, with which they were measured, was last in commit c7da5d1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tuning {
    /// The number of bytes sent at a time if data is reduced or forwarded.
    pub(super) segment: usize,
    /// The same for a large all-reduce between hosts, of whose segments each host gets a share.
    pub(super) shared_segment: usize,
    /// If a rank receives no more bytes than this in total, every rank sends all its data to every other rank.
    pub(super) small: usize,
}

impl Tuning {
    /// For TCP. Between two hosts of one rank, 1, 16 and 64 MiB took 0.24, 4.8 and 20 ms in segments of 64 KiB, 0.63,
    /// 10.5 and 48 ms of 128, and 0.65, 10.9 and 45 ms of 256 (medians of 5 rounds under load; the engine's segments
    /// were of 128 KiB then): larger ones do not fit into a socket's buffers, and both sides sleep more often. Command:
    ///
    /// `python3 scripts/compare_settings.py --hosts 2 --ranks 1 --sizes 1048576 16777216 67108864 --set
    /// CANDLE_DDP_CPU_SEGMENT_BYTES=65536 --set CANDLE_DDP_CPU_SEGMENT_BYTES=262144`
    ///
    /// With 4 ranks on one host, 128 KiB were as good. For `small`, see the engine's README.
    pub(super) const TCP: Self = Self { segment: 64 << 10, shared_segment: 64 << 10, small: 128 << 10 };
    /// For shared memory. 2 ranks, f32, medians of 5 rounds on 2 cores with other work: 1, 4 and 64 MiB took 41, 165
    /// and 6921 us in segments of 128 KiB; 39, 175 and 6027 us of 256; 42, 167 and 6641 us of 512. Segments matter only
    /// for large tensors. Command:
    ///
    /// `python3 scripts/compare_settings.py --sizes 1048576 4194304 67108864 --set CANDLE_DDP_CPU_SEGMENT_BYTES=131072
    /// --set CANDLE_DDP_CPU_SEGMENT_BYTES=524288`
    ///
    /// At once and in chunks, 64, 128 and 256 KiB took 3.3 and 4.2, 5.2 and 7.0, 9.5 and 9.3 us with 2 ranks; 64, 128
    /// and 256 KiB (192, 384 and 768 KiB received) 14.4 and 14.5, 24.1 and 21.3, 45.2 and 33.7 us with 4. Command:
    ///
    /// `python3 scripts/compare_settings.py --sizes 65536 131072 262144 524288 --set CANDLE_DDP_CPU_SMALL_BYTES=1000000
    /// --set CANDLE_DDP_CPU_SMALL_BYTES=0`, and with `--ranks 4`
    pub(super) const SHARED: Self = Self { segment: 256 << 10, shared_segment: 256 << 10, small: 256 << 10 };
    /// For groups with several hosts. Segments of 32, 128 and 256 KiB took 1.2, 1.1 to 1.8 and 1.5 to 1.6 times as long
    /// as those of 64: see `benches/results/allreduce_hierarchical.md`, with the command. At once and in chunks, 32 KiB
    /// took 59 and 63 us, 64 KiB 93 and 54 us (2 hosts of 2 ranks; medians of 5 rounds under load). Command:
    ///
    /// `python3 scripts/compare_settings.py --hosts 2 --sizes 16384 32768 65536 131072 --set CANDLE_DDP_CPU_SMALL_BYTES=0
    /// --set CANDLE_DDP_CPU_SMALL_BYTES=1000000`
    pub(super) fn of_hosts(hosts: usize) -> Self {
        /// A smaller share is not worth a message. On links of 200 Mbit/s, 16 hosts of 2 ranks took 2.0 times the links'
        /// bound for 64 MiB in segments of 64 KiB, and 1.1 times in segments of 256: see
        /// `benches/results/many_hosts.md`.
        const SHARE: usize = 16 << 10;
        Self { segment: 64 << 10, shared_segment: (64 << 10).max(hosts.saturating_mul(SHARE)), small: 32 << 10 }
    }

    /// These sizes, but for those that options set.
    pub(super) fn or(self, segment: Option<usize>, small: Option<usize>) -> Self {
        Self {
            segment: segment.unwrap_or(self.segment),
            shared_segment: segment.unwrap_or(self.shared_segment),
            small: small.unwrap_or(self.small),
        }
    }

    /// Limits the sizes to what the slots of the shared memory on every host hold.
    pub(super) fn within(self, layout: Layout) -> Self {
        Self {
            segment: self.segment.min(layout.part()),
            shared_segment: self.shared_segment.min(layout.part()),
            small: self.small.min(layout.capacity()),
        }
    }
}

/// Memory for the data of the peers: one slot for each, aligned for every element type.
#[derive(Default)]
pub(super) struct Scratch(Vec<u64>);

impl Scratch {
    /// Returns `count` slots of `bytes` each.
    fn slots(&mut self, count: usize, bytes: usize) -> Vec<&mut [u8]> {
        let words = bytes.div_ceil(8);
        if self.0.len() < count * words {
            self.0.resize(count * words, 0);
        }
        let slots = self.0.chunks_mut(words.max(1)).take(count);
        let mut slots: Vec<&mut [u8]> = slots.map(|slot| &mut bytemuck::cast_slice_mut(slot)[..bytes]).collect();
        slots.resize_with(count, || &mut []);
        slots
    }
}

/// Where the parts of all ranks lie in the input of an all-to-all, and in its output, which may lack this rank's own part.
#[derive(Clone, Copy)]
struct Places {
    each: usize,
    own: usize,
    has_own: bool,
}

impl Places {
    fn new(output: Region, input: Region, own: usize, world_size: usize) -> Self {
        Self { each: input.len() / world_size, own, has_own: output.len() == input.len() }
    }

    /// The bytes `piece` of the part for rank `peer` in the input.
    fn sent(self, peer: usize, piece: &Range<usize>) -> Range<usize> {
        peer * self.each + piece.start..peer * self.each + piece.end
    }

    /// The bytes `piece` of the part from rank `peer` in the output.
    fn received(self, peer: usize, piece: &Range<usize>) -> Range<usize> {
        self.sent(peer - usize::from(!self.has_own && peer > self.own), piece)
    }

    /// Copies the bytes `piece` of this rank's own part.
    fn copy_own(self, output: Region, input: Region, piece: &Range<usize>) -> Result<(), TransportError> {
        let own = self.sent(self.own, piece);
        if self.has_own { output.part(own.clone()).copy_from(input.part(own)) } else { Ok(()) }
    }
}

/// The bytes of chunk `index` when `elements` elements of `size` bytes are split into `count` chunks of nearly equal
/// size.
fn chunk(elements: usize, size: usize, index: usize, count: usize) -> Range<usize> {
    let (each, more) = (elements / count, elements % count);
    let start = |index: usize| (index * each + index.min(more)) * size;
    start(index)..start(index + 1)
}

/// The part of `range`, at most `length` bytes, that is sent in step `step`; empty beyond its end.
fn segment(range: &Range<usize>, length: usize, step: usize) -> Range<usize> {
    let start = range.start.saturating_add(length.saturating_mul(step)).min(range.end);
    start..start.saturating_add(length).min(range.end)
}

/// The part of `range` that was sent in the step before `step`; empty in the first step.
fn segment_before(range: &Range<usize>, length: usize, step: usize) -> Range<usize> {
    match step {
        0 => range.start..range.start,
        step => segment(range, length, step - 1),
    }
}

/// The largest multiple of the element size up to `segment`, but at least one element.
fn whole_elements(segment: usize, size: usize) -> usize {
    (segment / size).max(1) * size
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_and_segments_cover_everything_once() {
        for (elements, count) in [(0, 3), (2, 3), (10, 3), (7, 7), (1000, 7)] {
            let chunks: Vec<_> = (0..count).map(|index| chunk(elements, 4, index, count)).collect();
            let mut position = 0;
            for chunk in &chunks {
                for step in 0..elements + 1 {
                    let segment = segment(chunk, 12, step);
                    assert!(segment.start == position || segment.is_empty());
                    position = position.max(segment.end);
                }
                assert_eq!(position, chunk.end);
            }
            assert_eq!(position, elements * 4);
            assert!(chunks.iter().all(|chunk| chunk.len().abs_diff(elements * 4 / count) < 8));
        }
        assert_eq!((whole_elements(10, 4), whole_elements(3, 8)), (8, 8));
    }

    #[test]
    fn segments_grow_with_the_number_of_hosts() {
        let layout = Layout::new(2, Tuning::SHARED.segment);
        let shared =
            |hosts: usize, segment| Tuning::of_hosts(hosts).or(segment, None).within(layout).shared_segment >> 10;
        assert_eq!([2, 4, 5, 8, 16, 1000].map(|hosts| shared(hosts, None)), [64, 64, 80, 128, 256, 256]);
        assert_eq!([2, 16].map(|hosts| shared(hosts, Some(8 << 10))), [8, 8]);
        let others = Tuning::of_hosts(16).within(layout);
        assert_eq!((others.segment, others.small), (64 << 10, 32 << 10));
    }

    #[test]
    fn slots_do_not_overlap() {
        let mut scratch = Scratch::default();
        for (count, bytes) in [(3, 5), (2, 0), (0, 9), (4, 16)] {
            let slots = scratch.slots(count, bytes);
            assert_eq!(slots.len(), count);
            assert!(slots.iter().all(|slot| slot.len() == bytes));
        }
    }
}
