//! Reduction under virtual ranks: gradients are added along the binary tree over the micro-batches, whatever the number of
//! ranks. The engine moves the sums, and does not add them.
use super::tree_sum::TreeSum;
use crate::Result;
use crate::backend::Work;
use crate::ddp::buckets::bucket::{Bucket, Message};
use crate::ddp::buckets::groups::Groups;
use crate::ddp::buckets::usage::Usage;
use crate::process_group::ProcessGroup;
use crate::trace::{self, Trace};
use crate::virtual_ranks::VirtualRanks;
use candle_core::Tensor;

/// Rank `c` completes the tree for chunk `c` of each bucket: all ranks send it that chunk of the sums of their maximal
/// subtrees, one all-to-all for each place on their stacks, and get the result in an all-gather.
pub(crate) struct TreeReduction {
    ranks: VirtualRanks,
    sum: TreeSum,
    /// The counts of the micro-batches that this rank has computed in this step, if its passes are weighted.
    counts: Vec<f64>,
    /// The buckets in flight.
    in_flight: Vec<InFlight>,
    /// Memory of earlier passes, by bucket.
    memory: Vec<Option<Tensor>>,
}

/// A bucket whose sums are on their way to the ranks that add them up.
struct InFlight {
    number: usize,
    /// For each place on the ranks' stacks, this rank's chunk of their sums, in rank order; in the first without its own.
    received: Tensor,
    works: Vec<Work>,
}

impl TreeReduction {
    pub(crate) fn new(ranks: VirtualRanks, group: &ProcessGroup) -> Result<Self> {
        let sum = TreeSum::new(&ranks, group.rank(), group.world_size())?;
        Ok(Self { ranks, sum, counts: Vec::new(), in_flight: Vec::new(), memory: Vec::new() })
    }

    pub(crate) fn ranks(&self) -> &VirtualRanks {
        &self.ranks
    }

    /// The elements that the sums of a bucket take in addition to it, on this rank's stack and from other ranks.
    pub(crate) fn elements(&self, bucket: &Bucket, group: &ProcessGroup) -> usize {
        let depths = self.ranks.own().map(|number| bucket.write(self.ranks.leaf(number)).depth);
        let received = if group.world_size() > 1 { self.received(bucket.cut.length(), group) } else { 0 };
        depths.max().unwrap_or(0) * bucket.cut.length() + received
    }

    /// The elements that other ranks send of a bucket whose parts have `elements` elements.
    fn received(&self, elements: usize, group: &ProcessGroup) -> usize {
        self.ranks.rounds() * elements - elements / group.world_size()
    }

    /// Takes the count of the next micro-batch.
    pub(crate) fn add_count(&mut self, count: f64) {
        self.counts.push(count);
    }

    pub(crate) fn discard(&mut self) {
        self.counts.clear();
        // Their memory may still be written.
        self.in_flight.clear();
    }

    /// Sends the sums of this rank's subtrees.
    pub(crate) fn launch(&mut self, number: usize, bucket: &Bucket, group: &ProcessGroup) -> Result<()> {
        if group.world_size() == 1 {
            return Ok(());
        }
        let (rounds, own) = (self.ranks.rounds(), self.ranks.subtrees(group.rank()).len());
        let elements = bucket.sum.parts.elem_count();
        let own_part = elements / group.world_size();
        let received = self.memory(number, &bucket.sum.parts, self.received(elements, group))?;
        let mut works = Vec::with_capacity(rounds);
        for round in 0..rounds {
            let start = (round * elements).saturating_sub(own_part);
            let output = received.narrow(0, start, (round + 1) * elements - own_part - start)?;
            // A rank with fewer sums than others sends one again, and nobody reads it.
            works.push(group.all_to_all_async(&output, &bucket.sum_at(round.min(own - 1)).parts)?);
        }
        self.in_flight.push(InFlight { number, received, works });
        Ok(())
    }

    /// A flat tensor of `elements` elements like those of `parts`, that of the last pass if possible.
    fn memory(&mut self, number: usize, parts: &Tensor, elements: usize) -> Result<Tensor> {
        let fits = |kept: &Tensor| {
            kept.elem_count() == elements && kept.dtype() == parts.dtype() && kept.device().same_device(parts.device())
        };
        match self.memory.get_mut(number).and_then(Option::take).filter(fits) {
            Some(kept) => Ok(kept),
            None => Ok(Tensor::zeros(elements, parts.dtype(), parts.device())?),
        }
    }

    /// Waits until all buckets hold the mean over all micro-batches. Returns which parameters any rank used.
    pub(crate) fn finish(
        &mut self,
        buckets: &[Bucket],
        used: &[bool],
        message: Message,
        groups: &Groups,
        trace: Option<&Trace>,
    ) -> Result<Usage> {
        let usage = self.send_usage(used, message, groups)?;
        self.gather(buckets, groups, trace)?;
        usage.wait()?;
        Ok(usage)
    }

    /// Waits until all buckets hold the mean over all micro-batches.
    pub(crate) fn gather(&mut self, buckets: &[Bucket], groups: &Groups, trace: Option<&Trace>) -> Result<()> {
        let mut gathers = Vec::with_capacity(buckets.len());
        // A bucket's results are gathered while the next one is added up.
        self.add_up(buckets, groups, trace, |bucket, own| {
            let parts = &bucket.sum.parts;
            gathers.push(bucket.label.during(|| groups.of(parts.device()).all_gather_async(parts, own))?);
            Ok(())
        })?;
        for (number, work) in gathers.iter().enumerate() {
            work.wait()?;
            if let Some(trace) = trace {
                trace::collective(trace, work, format_args!("all-gather of bucket {number}"));
            }
        }
        Ok(())
    }

    /// Sends which parameters this rank used, and the counts of its micro-batches.
    pub(crate) fn send_usage(&mut self, used: &[bool], message: Message, groups: &Groups) -> Result<Usage> {
        let own_counts = std::mem::take(&mut self.counts);
        // One for each micro-batch, so that ranks add numbers to zeros: the order of their sum depends on no rank.
        let mut counts = if message.count.is_some() { vec![0.; self.ranks.count()] } else { Vec::new() };
        counts.iter_mut().skip(self.ranks.own().start).zip(own_counts).for_each(|(count, own)| *count = own);
        Usage::send_counts(used, message, &counts, groups.main())
    }

    /// Waits until this rank's part of each bucket in flight holds the mean over all micro-batches, and calls `then` with both.
    pub(crate) fn add_up(
        &mut self,
        buckets: &[Bucket],
        groups: &Groups,
        trace: Option<&Trace>,
        mut then: impl FnMut(&Bucket, &Tensor) -> Result<()>,
    ) -> Result<()> {
        for InFlight { number, received, works } in std::mem::take(&mut self.in_flight) {
            for work in &works {
                work.wait()?;
                if let Some(trace) = trace {
                    trace::collective(trace, work, format_args!("all-to-all of bucket {number}"));
                }
            }
            let bucket = &buckets[number];
            let own = own_part(&bucket.sum.parts, groups.of(bucket.sum.parts.device()))?;
            self.sum.run(&own, &received)?;
            then(bucket, &own)?;
            if self.memory.len() <= number {
                self.memory.resize(number + 1, None);
            }
            self.memory[number] = Some(received);
        }
        Ok(())
    }
}

/// The part of a bucket for which this rank completes the tree.
fn own_part(parts: &Tensor, group: &ProcessGroup) -> Result<Tensor> {
    let elements = parts.elem_count() / group.world_size();
    Ok(parts.narrow(0, group.rank() * elements, elements)?)
}
