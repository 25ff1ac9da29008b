//! How ranks take turns in an order: each takes every `world_size`-th of its places.
use super::Remainder;
use crate::{Error, Result};

/// A rank's part of an order. The places of an order are those of its samples, or of its batches where it makes them itself.
#[derive(Debug, Clone, Copy)]
pub(super) struct Deal {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) remainder: Remainder,
}

impl Deal {
    pub(super) fn new(rank: usize, world_size: usize, remainder: Remainder) -> Result<Self> {
        if world_size == 0 {
            return Err(Error::invalid("world_size", "it must be at least 1, not 0"));
        }
        if rank >= world_size {
            return Err(Error::RankOutOfRange { rank, world_size });
        }
        Ok(Self { rank, world_size, remainder })
    }

    /// Whether `len` places can be dealt out, at least one of them. `what` is what is there, and `unit` what it has.
    pub(super) fn check(&self, len: usize, what: &str, unit: &str) -> Result<()> {
        let world_size = self.world_size;
        if self.remainder == Remainder::Drop && len < world_size {
            let reason = format!(
                "Remainder::Drop would drop the whole {what}, which has {len} {unit} for {world_size} ranks: choose another \
                 remainder, or use fewer ranks"
            );
            return Err(Error::invalid("remainder", reason));
        }
        let padded = self.remainder == Remainder::Pad;
        if padded && len.div_ceil(world_size).checked_mul(world_size).is_none() {
            let reason =
                format!("{len} {unit} cannot be padded to a multiple of {world_size} ranks: the total overflows usize");
            return Err(Error::invalid("len", reason));
        }
        Ok(())
    }

    /// How many of `len` places this rank gets after all ranks have consumed `consumed`.
    pub(super) fn len_after(&self, len: usize, consumed: usize) -> usize {
        self.rank_len_after(self.rank, len, consumed)
    }

    /// How many of them rank 0 gets; no other rank gets more.
    pub(super) fn most_after(&self, len: usize, consumed: usize) -> usize {
        self.rank_len_after(0, len, consumed)
    }

    fn rank_len_after(&self, rank: usize, len: usize, consumed: usize) -> usize {
        let left = len.saturating_sub(consumed);
        match self.remainder {
            Remainder::Drop => left / self.world_size,
            Remainder::Pad => left.div_ceil(self.world_size),
            Remainder::Uneven => left.saturating_sub(rank).div_ceil(self.world_size),
        }
    }

    /// This rank's places of `len`, after all ranks have consumed the first `consumed`.
    pub(super) fn places_after(&self, len: usize, consumed: usize) -> Places {
        let remaining = self.len_after(len, consumed);
        Places { len, world_size: self.world_size, next: consumed.saturating_add(self.rank), remaining }
    }
}

/// The places of one rank.
#[derive(Debug, Clone)]
pub(super) struct Places {
    len: usize,
    world_size: usize,
    /// The next one in the padded list of all ranks' places.
    next: usize,
    remaining: usize,
}

impl Iterator for Places {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        self.remaining = self.remaining.checked_sub(1)?;
        // Padding repeats the list from its head, cyclically. There are places remaining only if there are any.
        let place = self.next % self.len;
        self.next = self.next.saturating_add(self.world_size);
        Some(place)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.remaining, Some(self.remaining))
    }
}

impl ExactSizeIterator for Places {}
