//! The layout of a segment.
use std::ops::Range;

/// The layout of every rank's segment: the same on all ranks and hosts of a group, and determined by these numbers.
/// Ranks have the numbers that they have on their host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// The largest number of ranks on a host.
    pub(super) ranks: usize,
    /// Number of slots in a rank's outbox for collectives, which all peers read; a power of two.
    pub(super) slots: usize,
    /// The size of such a slot in bytes.
    pub(super) capacity: usize,
    /// Number of slots in a rank's outbox for messages to one peer; a power of two.
    pub(super) direct_slots: usize,
    /// The size of such a slot in bytes.
    pub(super) direct_capacity: usize,
}

/// A ring of slots: first one line with the stamp and header of each slot, then the slots themselves.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ring {
    offset: usize,
    pub(super) slots: usize,
    pub(super) capacity: usize,
}

/// Words that different ranks write are two cache lines apart, since processors fetch lines in pairs.
const LINE: usize = 128;
const PAGE: usize = 4096;

/// The threads of a rank that may sleep, and whose progress others read: one for each channel.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Sleeper {
    Collectives,
    SendTo(usize),
    RecvFrom(usize),
}

impl Sleeper {
    fn index(self) -> usize {
        match self {
            Self::Collectives => 0,
            Self::SendTo(peer) => 1 + 2 * peer,
            Self::RecvFrom(peer) => 2 + 2 * peer,
        }
    }
}

impl Layout {
    /// The number of slots that a rank can fill before the slowest reader has read the first.
    const SLOTS: usize = 8;
    const DIRECT_SLOTS: usize = 4;
    /// The largest total size in bytes of a rank's outboxes, for collectives and for messages. Those of a pair of ranks
    /// take at most 4 MiB and 1 MiB.
    const LARGEST_SLOT: usize = 2 << 20;
    const LARGEST_DIRECT: usize = 4 << 20;
    const DIRECT_SLOT: usize = 128 << 10;

    /// The layout for slots that hold `part` bytes for each peer, on hosts of at most `ranks` ranks, which is two or more.
    pub(crate) fn new(ranks: usize, part: usize) -> Self {
        let peers = ranks - 1;
        let capacity = part.saturating_mul(peers).min(Self::LARGEST_SLOT.max(part)).max(LINE * peers);
        let direct = part.min(Self::DIRECT_SLOT).min(Self::LARGEST_DIRECT / (Self::DIRECT_SLOTS * peers)).max(LINE);
        Self {
            ranks,
            slots: Self::SLOTS,
            capacity: round_up(capacity, LINE),
            direct_slots: Self::DIRECT_SLOTS,
            direct_capacity: round_up(direct, LINE),
        }
    }

    /// The size of each peer's part of a slot in bytes, if a slot has parts.
    pub(crate) fn part(&self) -> usize {
        /// Parts start at cache lines and hold whole elements.
        const ALIGNMENT: usize = 64;
        self.capacity / (self.ranks - 1) / ALIGNMENT * ALIGNMENT
    }

    /// The size of a slot in bytes.
    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Two words: the eventcount of one of this rank's threads, and the rank that it waits for.
    pub(super) fn eventcount(&self, sleeper: Sleeper) -> usize {
        LINE * sleeper.index()
    }

    /// A word: how many slots of `peer`'s outbox for collectives this rank has passed.
    pub(super) fn passed(&self, peer: usize) -> usize {
        LINE * (1 + 2 * self.ranks + peer)
    }

    /// A word: the same for the messages of `peer` to this rank.
    pub(super) fn direct_passed(&self, peer: usize) -> usize {
        LINE * (1 + 3 * self.ranks + peer)
    }

    /// A word: how many calls this rank has finished, which shows its progress after its process has ended.
    pub(super) fn finished(&self, sleeper: Sleeper) -> usize {
        LINE * (1 + 4 * self.ranks + sleeper.index())
    }

    pub(super) fn ring(&self) -> Ring {
        let offset = round_up(LINE * (2 + 6 * self.ranks), PAGE);
        Ring { offset, slots: self.slots, capacity: self.capacity }
    }

    /// This rank's messages to the `index`-th of its peers.
    fn direct(&self, index: usize) -> Ring {
        let first = Ring { offset: self.ring().end(), slots: self.direct_slots, capacity: self.direct_capacity };
        Ring { offset: first.offset + index * (first.end() - first.offset), ..first }
    }

    /// The messages of rank `from` to rank `to`, in the segment of `from`.
    pub(super) fn direct_ring(&self, from: usize, to: usize) -> Ring {
        self.direct(to - usize::from(to > from))
    }

    /// The size of a segment in bytes. The system refuses absurd sizes.
    pub(super) fn size(&self) -> usize {
        self.direct(self.ranks - 1).offset
    }
}

impl Ring {
    /// The offset of a slot's stamp and header.
    pub(super) fn line(&self, position: u32) -> usize {
        self.offset + LINE * self.index(position)
    }

    pub(super) fn slot(&self, position: u32) -> Range<usize> {
        let start = self.offset + LINE * self.slots + self.capacity * self.index(position);
        start..start + self.capacity
    }

    fn index(&self, position: u32) -> usize {
        position as usize % self.slots
    }

    fn end(&self) -> usize {
        round_up(self.offset.saturating_add(self.slots.saturating_mul(LINE.saturating_add(self.capacity))), PAGE)
    }
}

fn round_up(bytes: usize, unit: usize) -> usize {
    bytes.checked_next_multiple_of(unit).unwrap_or(usize::MAX / unit * unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_overlaps() {
        for world_size in [2, 3, 8, 64] {
            for part in [1, 100, 128 << 10, 256 << 10] {
                let layout = Layout::new(world_size, part);
                let mut pieces: Vec<Range<usize>> = Vec::new();
                let mut word = |offset: usize| pieces.push(offset..offset + 8);
                word(layout.eventcount(Sleeper::Collectives));
                word(layout.finished(Sleeper::Collectives));
                for peer in 0..world_size {
                    word(layout.finished(Sleeper::SendTo(peer)));
                    word(layout.finished(Sleeper::RecvFrom(peer)));
                    word(layout.eventcount(Sleeper::SendTo(peer)));
                    word(layout.eventcount(Sleeper::RecvFrom(peer)));
                    word(layout.passed(peer));
                    word(layout.direct_passed(peer));
                }
                let own = world_size / 2;
                let direct = (0..world_size).filter(|peer| *peer != own).map(|peer| layout.direct_ring(own, peer));
                for ring in std::iter::once(layout.ring()).chain(direct) {
                    for position in 0..ring.slots as u32 {
                        pieces.push(ring.line(position)..ring.line(position) + 64);
                        pieces.push(ring.slot(position));
                    }
                }
                pieces.sort_by_key(|piece| piece.start);
                assert!(pieces.windows(2).all(|pair| pair[0].end <= pair[1].start), "{layout:?}");
                assert!(pieces.last().unwrap().end <= layout.size());
                // The README's limit.
                assert!(layout.size() <= (16 << 20) / 2 * (world_size - 1), "{layout:?}: {}", layout.size());
            }
        }
    }
}
