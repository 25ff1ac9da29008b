//! Virtual ranks: the passes of a step, one for each micro-batch.
use super::Reducer;
use super::state::{Gradient, State};
use crate::ddp::reduction::tree::TreeReduction;
use crate::virtual_ranks::{Leaf, VirtualRanks};
use crate::{Error, Result};
use std::ops::Range;

impl Reducer {
    pub(crate) fn virtual_ranks(&self) -> Option<VirtualRanks> {
        self.lock().virtual_ranks().cloned()
    }

    /// The numbers of the micro-batches that this rank computes in each step; None without virtual ranks.
    pub(crate) fn micro_batches(&self) -> Option<Range<usize>> {
        self.virtual_ranks().map(|ranks| ranks.own())
    }

    /// The place of the micro-batch `number` in the tree.
    pub(crate) fn leaf(&self, number: usize) -> Option<Leaf> {
        self.virtual_ranks().map(|ranks| ranks.leaf(number))
    }

    /// Whether the next micro-batch is the first of a step.
    pub(crate) fn is_between_steps(&self) -> bool {
        self.lock().computed == 0
    }

    /// Whether the first step is complete.
    pub(crate) fn has_trained(&self) -> bool {
        self.lock().trained
    }

    /// Returns an error unless the micro-batch `number` comes next.
    pub(crate) fn check_next(&self, number: usize) -> Result<()> {
        let state = self.lock();
        let Some(ranks) = state.virtual_ranks() else { return Ok(()) };
        let Range { start, end } = ranks.own();
        let next = start + state.computed;
        if number == next {
            return Ok(());
        }
        let reason = format!(
            "micro-batch {next} comes next on rank {}, not {number}: in each step it computes the micro-batches {start} to {} of \
             {}, each once and in this order. After a step that was left in its middle, call zero_grad() on every rank",
            self.groups.main().rank(),
            end - 1,
            ranks.count()
        );
        Err(Error::invalid("micro_batch", reason))
    }
}

impl State {
    pub(super) fn virtual_ranks(&self) -> Option<&VirtualRanks> {
        self.reduction.tree().map(TreeReduction::ranks)
    }

    /// Keeps the gradients of the micro-batch `leaf`, which is not the last of the step. There are no results yet.
    pub(super) fn keep(&mut self, leaf: Leaf) -> Result<Vec<Gradient>> {
        for bucket in &mut self.buckets {
            bucket.flush()?;
            for slot in (0..bucket.members.len()).filter(|slot| !bucket.arrived[*slot]) {
                bucket.put_zeros(slot, leaf)?;
            }
            bucket.merge(leaf)?;
        }
        self.computed += 1;
        Ok(self.parameters.iter().map(|_| Gradient::Absent).collect())
    }
}
