//! The layout of a segment.
use std::ops::Range;

/// The layout of every rank's segment: the same on all ranks and hosts of a group, and determined by these numbers.
/// Ranks are numbered by their position on their host.
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

impl Layout {
    /// The number of slots that a rank can fill before the slowest reader has read the first.
    const SLOTS: usize = 8;
    const DIRECT_SLOTS: usize = 4;
    /// The largest slot of the collectives, and the largest size of those of all ranks of a host together, in bytes.
    const LARGEST_SLOT: usize = 2 << 20;
    const LARGEST_TOTAL: usize = 256 << 20;
    /// The largest size of a rank's outboxes for messages in bytes, and of one of their slots.
    const LARGEST_DIRECT: usize = 4 << 20;
    const DIRECT_SLOT: usize = 128 << 10;
    /// Parts start at cache lines and hold whole elements.
    const ALIGNMENT: usize = 64;

    /// The layout for slots that hold `part` bytes for each peer, on hosts of at most `ranks` ranks, which is two or more.
    pub(crate) fn new(ranks: usize, part: usize) -> Self {
        let peers = ranks - 1;
        let most = Self::LARGEST_SLOT.min(Self::LARGEST_TOTAL / (Self::SLOTS * ranks));
        // A larger part than any default is an option of the user's.
        let most = if part > Self::LARGEST_SLOT { part } else { most };
        let capacity = part.saturating_mul(peers).min(most).max(Self::ALIGNMENT * peers).max(LINE);
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
        self.capacity / (self.ranks - 1) / Self::ALIGNMENT * Self::ALIGNMENT
    }

    /// The size of a slot in bytes.
    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Two words: the eventcount of one of this rank's threads, and the rank that it waits for.
    pub(super) fn eventcount(&self, sleeper: Sleeper) -> usize {
        self.of_sleeper(sleeper, 0)
    }

    /// A word: how many calls this rank has finished, which shows its progress after its process has ended.
    pub(super) fn finished(&self, sleeper: Sleeper) -> usize {
        self.of_sleeper(sleeper, 1)
    }

    /// One of the two lines of a thread: those for messages are in the part that is reserved when it is needed.
    fn of_sleeper(&self, sleeper: Sleeper, line: usize) -> usize {
        match sleeper {
            Sleeper::Collectives => LINE * line,
            Sleeper::SendTo(peer) => self.reserved() + LINE * (4 * peer + line),
            Sleeper::RecvFrom(peer) => self.reserved() + LINE * (4 * peer + 2 + line),
        }
    }

    /// A word: how many slots of `peer`'s outbox for collectives this rank has passed.
    pub(super) fn passed(&self, peer: usize) -> usize {
        2 * LINE + self.spacing() * peer
    }

    /// The distance of such words: this rank alone writes them, so with very many they may share lines and fit into few pages.
    fn spacing(&self) -> usize {
        (2 * PAGE / self.ranks).clamp(4, LINE) / 4 * 4
    }

    /// A word: the same for the messages of `peer` to this rank.
    pub(super) fn direct_passed(&self, peer: usize) -> usize {
        self.reserved() + LINE * (4 * self.ranks + peer)
    }

    pub(super) fn ring(&self) -> Ring {
        let offset = round_up(2 * LINE + self.spacing() * self.ranks, LINE);
        Ring { offset, slots: self.slots, capacity: self.capacity }
    }

    /// The size of the part for the collectives, which every rank reserves when a group is made.
    pub(super) fn reserved(&self) -> usize {
        self.ring().end()
    }

    /// The words for messages, which are reserved with a rank's first message.
    pub(super) fn direct_words(&self) -> Range<usize> {
        self.reserved()..round_up(self.direct_passed(self.ranks), PAGE)
    }

    /// This rank's messages to the `index`-th of its peers.
    fn direct(&self, index: usize) -> Ring {
        let offset = self.direct_words().end;
        let first = Ring { offset, slots: self.direct_slots, capacity: self.direct_capacity };
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

    /// All of it.
    pub(super) fn range(&self) -> Range<usize> {
        self.offset..self.end()
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
        for world_size in [2, 3, 8, 64, 512] {
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
                // The README's limits.
                assert!(layout.reserved() * world_size <= (256 << 20) + world_size * 4 * PAGE, "{layout:?}");
                assert!(layout.reserved() <= (2 << 20) * (world_size - 1) + 4 * PAGE, "{layout:?}");
                assert!(layout.direct_words().start >= layout.ring().slot(7).end);
            }
        }
    }
}
