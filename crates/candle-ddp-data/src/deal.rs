//! How ranks take turns in an order: each takes every `world_size`-th of its places.
use super::{LoaderGroup, LoaderOptions, Remainder, SamplerOptions};
use candle_ddp_state::{Error, Result};

/// A rank's part of an order. A place of an order is a sample, or a batch if the order makes batches itself.
#[derive(Debug, Clone, Copy)]
pub(super) struct Deal {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) remainder: Remainder,
    /// Under virtual ranks, which `world_size` and `rank` are then about, those that this rank computes from `rank` on.
    block: Option<Block>,
}

/// Micro-batches in the order in which a rank computes them: in each step, one of each of its virtual ranks.
#[derive(Debug, Clone, Copy)]
struct Block {
    virtual_ranks: usize,
    /// The places of a micro-batch.
    batch_size: usize,
    /// Whether a last global batch that would not be full is left out; otherwise it is filled from the epoch's head.
    drop_last: bool,
}

impl Deal {
    pub(super) fn new(rank: usize, world_size: usize, remainder: Remainder) -> Result<Self> {
        if rank >= world_size {
            let reason = format!(
                "it must be below world_size, which is {world_size}, not {rank}: the arguments are `len, rank, world_size, options`, \
                 in this order"
            );
            return Err(Error::invalid("rank", reason));
        }
        Ok(Self { rank, world_size, remainder, block: None })
    }

    /// The part of this rank under these options: its samples, or the micro-batches of its virtual ranks, as if each were a
    /// rank. Then every global batch is full.
    pub(super) fn of(options: &LoaderOptions, group: &dyn LoaderGroup) -> Result<Self> {
        let (rank, world_size) = (group.rank(), group.world_size());
        let LoaderOptions { batch_size, drop_last, sampler: SamplerOptions { remainder, .. }, .. } = *options;
        // All micro-batches have as many samples.
        let ranks = group.virtual_ranks().zip(group.micro_batches());
        let Some((count, own)) = ranks.filter(|_| remainder != Remainder::Uneven) else {
            return Self::new(rank, world_size, remainder);
        };
        options.check()?;
        let drop_last = drop_last || remainder == Remainder::Drop;
        let block = Block { virtual_ranks: own.len(), batch_size, drop_last };
        Ok(Self { block: Some(block), ..Self::new(own.start, count, remainder)? })
    }

    /// The number of batches that this rank has in a step.
    pub(super) fn batches_per_step(&self) -> usize {
        self.block.map_or(1, |block| block.virtual_ranks)
    }

    /// Whether its parts are micro-batches of virtual ranks.
    pub(super) fn is_virtual(&self) -> bool {
        self.block.is_some()
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
        if let Some(Block { batch_size, .. }) = self.block {
            let global = world_size.checked_mul(batch_size).filter(|global| len.checked_add(*global).is_some());
            if global.is_none() {
                let reason = format!("virtual ranks × batch_size, {world_size} × {batch_size}, is too large");
                return Err(Error::invalid("batch_size", reason));
            }
        }
        let padded = self.remainder == Remainder::Pad;
        if padded && len.div_ceil(world_size).checked_mul(world_size).is_none() {
            let reason =
                format!("{len} {unit} cannot be padded to a multiple of {world_size} ranks: the total overflows usize");
            return Err(Error::invalid("len", reason));
        }
        Ok(())
    }

    /// Checks that some rank has a batch of `len` places, which are at least one.
    pub(super) fn check_batches(&self, len: usize, options: &LoaderOptions) -> Result<()> {
        let samples = self.most_after(len, 0);
        if options.num_batches(samples) > 0 {
            return Ok(());
        }
        let LoaderOptions { batch_size, .. } = options;
        let reason = match self.block {
            None => format!(
                "drop_last leaves no batch at all: this rank has {samples} samples, fewer than a batch of {batch_size}. Make \
                 batch_size {samples} or less, set drop_last to false, or use fewer ranks"
            ),
            Some(_) => format!(
                "drop_last leaves no batch at all: the dataset has fewer samples than a global batch of {} × {batch_size}. Make \
                 batch_size smaller, set drop_last to false and use Remainder::Pad, or use fewer virtual ranks",
                self.world_size
            ),
        };
        Err(Error::invalid("batch_size", reason))
    }

    /// How many of `len` places this rank gets after all ranks have consumed `consumed`.
    pub(super) fn len_after(&self, len: usize, consumed: usize) -> usize {
        self.rank_len_after(self.rank, len, consumed).saturating_mul(self.batches_per_step())
    }

    /// The number of them that rank 0, or each virtual rank, gets; no other rank gets more.
    pub(super) fn most_after(&self, len: usize, consumed: usize) -> usize {
        self.rank_len_after(0, len, consumed)
    }

    /// On rank 0, how many places come a second time after all ranks have consumed `consumed`.
    pub(super) fn padding_after(&self, len: usize, consumed: usize, options: &LoaderOptions) -> usize {
        let most = self.most_after(len, consumed);
        // The padding is at the end.
        let is_dropped = options.drop_last && !most.is_multiple_of(options.batch_size);
        if self.rank > 0 || self.remainder != Remainder::Pad || is_dropped {
            return 0;
        }
        most.saturating_mul(self.world_size).saturating_sub(len.saturating_sub(consumed))
    }

    pub(super) fn rank_len_after(&self, rank: usize, len: usize, consumed: usize) -> usize {
        let left = len.saturating_sub(consumed);
        if let Some(Block { batch_size, drop_last, .. }) = self.block {
            let global = batch_size * self.world_size;
            return batch_size * if drop_last { left / global } else { left.div_ceil(global) };
        }
        match self.remainder {
            Remainder::Drop => left / self.world_size,
            Remainder::Pad => left.div_ceil(self.world_size),
            Remainder::Uneven => left.saturating_sub(rank).div_ceil(self.world_size),
        }
    }

    /// This rank's places of `len`, after all ranks have consumed the first `consumed`.
    pub(super) fn places_after(&self, len: usize, consumed: usize) -> Places {
        let remaining = self.len_after(len, consumed);
        let next = consumed.saturating_add(self.rank);
        Places { len, world_size: self.world_size, next, remaining, block: self.block, taken: 0 }
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
    block: Option<Block>,
    /// How many it has returned.
    taken: usize,
}

impl Places {
    /// How many of the next `most` places are not padding, which is at the end.
    pub(super) fn before_padding(&self, most: usize) -> usize {
        let mut ahead = self.clone();
        let is_padding = |_: &usize| {
            let next = ahead.next;
            ahead.advance();
            next >= ahead.len
        };
        (0..most.min(self.remaining)).find(is_padding).unwrap_or(most.min(self.remaining))
    }

    /// Moves to the next place.
    fn advance(&mut self) {
        self.next = self.next.saturating_add(self.world_size);
        self.taken += 1;
        let Some(Block { virtual_ranks, batch_size, .. }) = self.block else { return };
        if self.taken.is_multiple_of(batch_size) {
            // The micro-batch of the next virtual rank begins beside this one; after the last one, the next step begins.
            let is_last = self.taken.is_multiple_of(batch_size * virtual_ranks);
            let next =
                if is_last { self.next + 1 - virtual_ranks } else { self.next + 1 - batch_size * self.world_size };
            self.next = next;
        }
    }
}

impl Iterator for Places {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        self.remaining = self.remaining.checked_sub(1)?;
        // Padding repeats the list from its head, cyclically. There are places remaining only if there are any.
        let place = self.next % self.len;
        self.advance();
        Some(place)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.remaining, Some(self.remaining))
    }
}

impl ExactSizeIterator for Places {}
