//! The sums of gradients in a bucket. There is one, unless virtual ranks add the gradients of several micro-batches along
//! a tree: then a rank has a stack of sums, one for each maximal subtree of what it has computed.
use crate::Result;
use crate::tensor::copy;
use candle_core::{Shape, Tensor};

/// One sum of gradients: views of one storage.
pub(in crate::ddp) struct Sum {
    /// All gradients.
    pub(in crate::ddp) flat: Tensor,
    /// Begins with the gradients and divides into as many equal parts as there are ranks.
    pub(in crate::ddp) parts: Tensor,
    /// Each gradient in its shape.
    pub(in crate::ddp) gradients: Vec<Tensor>,
}

/// Where a gradient goes: destination = (destination if `accumulate` + gradient) × factor.
#[derive(Clone, Copy, Debug)]
pub(in crate::ddp) struct Write {
    /// The place of the sum on the stack.
    pub(in crate::ddp) depth: usize,
    pub(in crate::ddp) factor: f64,
    pub(in crate::ddp) accumulate: bool,
}

impl Sum {
    /// Views of `storage`, whose first `elements` elements are gradients of these shapes, and of its first `in_parts`.
    pub(in crate::ddp) fn new<'a>(
        storage: &Tensor,
        elements: usize,
        in_parts: usize,
        shapes: impl IntoIterator<Item = &'a Shape>,
    ) -> Result<Self> {
        let (flat, parts) = (storage.narrow(0, 0, elements)?, storage.narrow(0, 0, in_parts)?);
        let gradients = copy::views(&flat, shapes)?;
        Ok(Self { flat, parts, gradients })
    }

    /// Without gradients; `none` has no elements.
    pub(in crate::ddp) fn none(none: &Tensor) -> Self {
        Self { flat: none.clone(), parts: none.clone(), gradients: Vec::new() }
    }

    /// The same in its own memory.
    pub(in crate::ddp) fn another(&self) -> Result<Self> {
        let storage = self.parts.zeros_like()?;
        Self::new(&storage, self.flat.elem_count(), self.parts.elem_count(), self.gradients.iter().map(Tensor::shape))
    }
}
