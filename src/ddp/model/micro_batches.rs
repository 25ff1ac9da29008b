//! A rank's micro-batches under virtual ranks.
use crate::Result;
use crate::ddp::DistributedDataParallel;
use crate::ddp::pass::micro_batch;
use crate::panic::lock;
use std::ops::Range;

impl<M> DistributedDataParallel<M> {
    /// The numbers of the micro-batches that this rank computes in each step, under
    /// [virtual ranks](crate::InitOptions::virtual_ranks). None without.
    pub fn micro_batches(&self) -> Option<Range<usize>> {
        self.core.reducer.micro_batches()
    }

    /// The number of micro-batches that this rank computes per second, from forward to backward pass, on the average since the first step:
    /// for [`share_by_speed`](crate::ProcessGroup::share_by_speed). None before the second step, without
    /// [virtual ranks](crate::InitOptions::virtual_ranks), and on a GPU, where passes end after their calls.
    pub fn micro_batches_per_second(&self) -> Option<f64> {
        let pace = lock(&self.core.pace);
        pace.per_second().filter(|_| self.core.group().device().is_cpu())
    }

    /// Returns a number of every micro-batch of a step, such as its loss, in the order of the micro-batches, under
    /// [virtual ranks](crate::InitOptions::virtual_ranks). `own` are those of this rank's
    /// [`micro_batches`](Self::micro_batches). A sum or a mean of the result has the same bits on any number of ranks, while the
    /// order in which
    /// [`all_reduce_scalars`](crate::ProcessGroup::all_reduce_scalars) adds depends on the ranks. Every rank must call it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) on every rank if one gives another number of values than it has
    /// micro-batches; without virtual ranks; errors of the group.
    pub fn gather_micro_batches(&self, own: &[f64]) -> Result<Vec<f64>> {
        micro_batch::gather(&self.core, own)
    }
}
