//! The sums of gradients in a bucket. There is one, unless virtual ranks add the gradients of several micro-batches along
//! a tree: then a rank has a stack of sums, one for each maximal subtree of what it has computed.
use super::bucket::Bucket;
use crate::Result;
use crate::kernels::Assignment;
use crate::tensor::copy;
use crate::virtual_ranks::Leaf;
use candle_core::{Shape, Tensor};

/// One sum of gradients: views of one storage.
pub(super) struct Sum {
    /// All gradients.
    pub(super) flat: Tensor,
    /// Begins with the gradients and divides into as many equal parts as there are ranks.
    pub(super) parts: Tensor,
    /// Each gradient in its shape.
    pub(super) gradients: Vec<Tensor>,
}

/// Where a gradient goes: destination = (destination if `accumulate` + gradient) × factor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Write {
    /// The place of the sum on the stack.
    pub(super) depth: usize,
    pub(super) factor: f64,
    pub(super) accumulate: bool,
}

impl Sum {
    /// Views of `storage`, whose first `elements` elements are gradients of these shapes, and of its first `in_parts`.
    pub(super) fn new<'a>(
        storage: &Tensor,
        elements: usize,
        in_parts: usize,
        shapes: impl IntoIterator<Item = &'a Shape>,
    ) -> Result<Self> {
        let (flat, parts) = (storage.narrow(0, 0, elements)?, storage.narrow(0, 0, in_parts)?);
        let gradients = copy::views(&flat, shapes)?;
        Ok(Self { flat, parts, gradients })
    }

    /// The same in its own memory.
    fn another(&self) -> Result<Self> {
        let storage = self.parts.zeros_like()?;
        Self::new(&storage, self.flat.elem_count(), self.parts.elem_count(), self.gradients.iter().map(Tensor::shape))
    }
}

impl Bucket {
    /// The sum at `depth` of the stack; the lowest is the bucket itself.
    pub(super) fn sum_at(&self, depth: usize) -> &Sum {
        depth.checked_sub(1).map_or(&self.sum, |above| &self.stack[above])
    }

    /// Makes the memory that the gradients of `leaf` need.
    pub(super) fn make_room(&mut self, leaf: Leaf) -> Result<()> {
        while self.stack.len() < self.write(leaf).depth {
            self.stack.push(self.sum.another()?);
        }
        Ok(())
    }

    /// Where the gradients of the micro-batch `leaf` go.
    pub(super) fn write(&self, leaf: Leaf) -> Write {
        // Adding a gradient to its sibling's on its way into the bucket saves a pass over memory. If the bucket rounds it, that
        // must happen first, as it does where the sibling is another rank's.
        let accumulate = leaf.merges > 0 && self.is_exact;
        let depth = leaf.depth - usize::from(accumulate);
        Write { depth, factor: leaf.root.filter(|_| accumulate && leaf.merges == 1).unwrap_or(1.), accumulate }
    }

    /// Takes zeros as the gradient of the member `slot`, which the micro-batch `leaf` does not use.
    pub(super) fn put_zeros(&self, slot: usize, leaf: Leaf) -> Result<()> {
        let Write { depth, factor, accumulate } = self.write(leaf);
        let destination = &self.sum_at(depth).gradients[slot];
        if !accumulate {
            return Ok(destination.zero_set()?);
        }
        // Added as well, like zeros of another rank: -0 + 0 is 0.
        let source = &destination.zeros_like()?;
        Ok(copy::assign(&[Assignment { destination, source, factor, accumulate }])?)
    }

    /// Completes the nodes of the tree of which the micro-batch `leaf` is the last part, once all its gradients are there.
    pub(super) fn merge(&self, leaf: Leaf) -> Result<()> {
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
