//! When the ranks compare their models.
use crate::{Error, Result};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// How often ranks compare their models, bit for bit, by hashes. An option of [`DdpOptions`](crate::DdpOptions).
///
/// The parameters of all ranks are the same as long as all make the same steps with the same averaged gradients. A rank that makes a
/// step more or less, has another learning rate, or loads a file
/// that the others do not load, parts from them without an error of any collective. So does one whose memory flips a bit.
///
/// The ranks compare parameters, frozen variables, and buffers if they are [broadcast](crate::DdpOptions::broadcast_buffers), at the end
/// of a backward pass; and of the last step of an [optimizer](crate::optim::Optimizer) of this crate its options and its number, if the
/// optimizer has a state. They do so in the second pass, since most causes are there from the first step on, in the 10th and the 100th, and
/// every `every` passes.
/// Passes under `no_sync` or in a join do not count, nor do those of a communication hook that averages no gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaCheck {
    /// The number of synchronised backward passes from one comparison to the next; at least 1. Default: 1000.
    pub every: u64,
    /// Whether a difference is only a warning, which rank 0 gives once, and not [`Error::ReplicasDiffer`] on every rank, which ends the
    /// group. Default: false.
    pub warn_only: bool,
}

impl Default for ReplicaCheck {
    fn default() -> Self {
        Self { every: 1000, warn_only: false }
    }
}

impl ReplicaCheck {
    /// Whether the pass with this number ends with a comparison. Most causes are there from the first step on.
    pub(in crate::ddp) fn is_due(&self, pass: u64) -> bool {
        [2, 10, 100].contains(&pass) || pass.is_multiple_of(self.every)
    }

    pub(in crate::ddp) fn check(&self) -> Result<()> {
        match self.every {
            0 => Err(Error::invalid("replica_check", "`every` must be at least 1, not 0 (None turns the check off)")),
            _ => Ok(()),
        }
    }
}

/// A model's memory of earlier comparisons.
#[derive(Debug, Default)]
pub(in crate::ddp) struct Compared {
    /// The number of passes that count.
    passes: AtomicU64,
    has_warned: AtomicBool,
}

impl Compared {
    /// Counts a pass. Returns its number.
    pub(in crate::ddp) fn count(&self) -> u64 {
        self.passes.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// The number of the next pass that counts.
    pub(in crate::ddp) fn next(&self) -> u64 {
        self.passes.load(Ordering::Relaxed) + 1
    }

    /// Whether this is the first warning.
    pub(in crate::ddp) fn warns(&self) -> bool {
        !self.has_warned.swap(true, Ordering::Relaxed)
    }
}
