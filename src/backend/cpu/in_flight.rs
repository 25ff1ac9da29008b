//! Tracks which bytes of tensors are used by calls of this process that are in flight.
//!
//! Different queues work at the same time, in an order that differs between ranks. So a call is refused if it would
//! change bytes that a call in another queue uses, or use bytes that such a call changes. Calls that `run` executes on
//! the calling thread are compared with those in flight but not recorded: that would slow down small messages and find
//! little.
use crate::backend::check::{extent, intersect};
use crate::backend::{Access, Collective};
use crate::error::describe;
use crate::panic::lock;
use crate::{Error, Result};
use candle_core::Tensor;
use candle_ddp_engine::Call;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// The uses of each storage.
static USES: Mutex<BTreeMap<usize, Vec<Use>>> = Mutex::new(BTreeMap::new());

/// The number of calls with uses in [`USES`].
static CALLS: AtomicUsize = AtomicUsize::new(0);

/// The number of the next call.
static TICKETS: AtomicU64 = AtomicU64::new(0);

/// One call's use of one tensor.
struct Use {
    bytes: Range<usize>,
    is_change: bool,
    by: Caller,
    ticket: u64,
}

/// A call and its queue.
#[derive(Clone, Copy)]
pub(super) struct Caller {
    /// Identifies the queue that runs the call. Calls in one queue run one after another.
    pub(super) queue: usize,
    pub(super) rank: usize,
    pub(super) call: Call,
}

/// A call that is in flight until this is dropped, which must happen before its tensors are dropped.
pub(super) struct InFlight {
    ticket: u64,
    storages: Vec<usize>,
}

impl Caller {
    /// Records that the call is in flight, unless it conflicts with another one.
    pub(super) fn enter(self, collective: &Collective) -> Result<InFlight> {
        let tensors = self.tensors(collective);
        let extents: Vec<_> = tensors.iter().map(|(tensor, _)| extent(tensor)).collect();
        let mut uses = lock(&USES);
        for ((tensor, is_change), (storage, bytes)) in tensors.iter().zip(&extents) {
            self.check(&uses, tensor, *storage, bytes, *is_change)?;
        }
        CALLS.fetch_add(1, Ordering::Relaxed);
        let ticket = TICKETS.fetch_add(1, Ordering::Relaxed);
        let mut storages = Vec::with_capacity(tensors.len());
        for ((_, is_change), (storage, bytes)) in tensors.into_iter().zip(extents) {
            uses.entry(storage).or_default().push(Use { bytes, is_change, by: self, ticket });
            storages.push(storage);
        }
        Ok(InFlight { ticket, storages })
    }

    /// Checks whether the call, which is to run at once, conflicts with one in flight.
    pub(super) fn compare(self, collective: &Collective) -> Result<()> {
        // Calls that this thread has started are seen. Calls that other threads start at this moment are a race in the
        // program.
        if CALLS.load(Ordering::Relaxed) == 0 {
            return Ok(());
        }
        for (tensor, is_change) in self.tensors(collective) {
            let (storage, bytes) = extent(tensor);
            self.check(&lock(&USES), tensor, storage, &bytes, is_change)?;
        }
        Ok(())
    }

    fn check(
        self,
        uses: &BTreeMap<usize, Vec<Use>>,
        tensor: &Tensor,
        storage: usize,
        bytes: &Range<usize>,
        is_change: bool,
    ) -> Result<()> {
        let conflicts = |other: &&Use| {
            other.by.queue != self.queue && (is_change || other.is_change) && intersect(bytes, &other.bytes)
        };
        let Some(other) = uses.get(&storage).and_then(|uses| uses.iter().find(conflicts)) else { return Ok(()) };
        let reason = format!(
            "{} overlaps the tensor of {}, which rank {} has in flight on another channel (bytes {:?} and {:?} of one \
             storage), and their order is not determined: wait for that call before this one, or use slices \
             that do not overlap",
            describe(tensor.dtype(), tensor.shape()),
            other.by.call,
            other.by.rank,
            bytes,
            other.bytes,
        );
        Err(Error::InvalidTensor { rank: self.rank, operation: self.call.operation.name().to_string(), reason })
    }

    /// The tensors of the call on this rank, and whether it changes them.
    fn tensors(self, collective: &Collective) -> Vec<(&Tensor, bool)> {
        let is_changed_here = self.call.operation.changes_output(self.call.root == Some(self.rank));
        let is_change = |access| access == Access::Write && is_changed_here;
        collective.tensors().map(|(_, tensor, access)| (tensor, is_change(access))).collect()
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let mut uses = lock(&USES);
        for storage in &self.storages {
            let Some(of_storage) = uses.get_mut(storage) else { continue };
            of_storage.retain(|other| other.ticket != self.ticket);
            if of_storage.is_empty() {
                uses.remove(storage);
            }
        }
        CALLS.fetch_sub(1, Ordering::Relaxed);
    }
}
