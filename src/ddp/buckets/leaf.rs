//! The gradients of one micro-batch in a bucket, under virtual ranks.
use crate::Result;
use crate::ddp::buckets::bucket::Bucket;
use crate::ddp::buckets::sums::Write;
use crate::kernels::Assignment;
use crate::tensor::copy;
use crate::virtual_ranks::Leaf;

impl Bucket {
    /// Makes the memory that the gradients of `leaf` need.
    pub(in crate::ddp) fn make_room(&mut self, leaf: Leaf) -> Result<()> {
        while self.stack.len() < self.write(leaf).depth {
            self.stack.push(self.sum.another()?);
        }
        Ok(())
    }

    /// Where the gradients of the micro-batch `leaf` go.
    pub(in crate::ddp) fn write(&self, leaf: Leaf) -> Write {
        // Adding a gradient to its sibling's on its way into the bucket saves a pass over memory. If the bucket rounds it, that
        // must happen first, as it does where the sibling is another rank's.
        let accumulate = leaf.merges > 0 && self.is_exact;
        let depth = leaf.depth - usize::from(accumulate);
        Write { depth, factor: leaf.root.filter(|_| accumulate && leaf.merges == 1).unwrap_or(1.), accumulate }
    }

    /// Takes zeros as the gradient of the member `slot`, which the micro-batch `leaf` does not use.
    pub(in crate::ddp) fn put_zeros(&self, slot: usize, leaf: Leaf) -> Result<()> {
        let Write { depth, factor, accumulate } = self.write(leaf);
        let destination = &self.sum_at(depth).gradients[slot];
        if !accumulate {
            return Ok(destination.zero_set()?);
        }
        // Added as well, like zeros of another rank: -0 + 0 is 0.
        let source = &destination.zeros_like()?;
        Ok(copy::assign(&[Assignment { destination, source, factor, accumulate }])?)
    }

    /// Completes the nodes of the tree whose last part is the micro-batch `leaf`, once all its gradients are there.
    pub(in crate::ddp) fn merge(&self, leaf: Leaf) -> Result<()> {
        let Write { depth: top, accumulate, .. } = self.write(leaf);
        let merges = leaf.merges - usize::from(accumulate);
        for merge in 1..=merges {
            let upper = top + 1 - merge;
            let factor = leaf.root.filter(|_| merge == merges).unwrap_or(1.);
            let (destination, source) = (&self.sum_at(upper - 1).flat, &self.sum_at(upper).flat);
            copy::assign(&[Assignment { destination, source, factor, accumulate: true }])?;
        }
        Ok(())
    }
}
