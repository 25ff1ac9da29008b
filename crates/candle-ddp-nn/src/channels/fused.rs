//! The operations that a normalisation fuses into its pass over memory.
use candle_core::{Result, Tensor, WithDType};
use candle_ddp_tensor::kernels::Output;

/// The operation after a normalisation, in the same pass over memory.
pub(crate) enum After {
    Nothing,
    Relu,
    /// A tensor of the same shape and dtype, contiguous, is added first.
    AddRelu(Tensor),
}

/// The operation after a normalisation, as far as the backward pass must know it.
pub(crate) enum Passed {
    Nothing,
    Relu,
    /// The added tensor. The ReLU of the sum is computed again.
    AddRelu(Tensor),
    /// On a GPU, a bit for each element instead.
    Mask(Mask),
}

/// Which elements a ReLU has let through: a bit for each, in bytes for `per` elements.
pub(crate) struct Mask {
    pub(super) bytes: Output,
    pub(super) per: usize,
}

/// A ReLU after the normalisation: gradients pass where (x − mean) × scale + shift is positive.
#[derive(Clone, Copy)]
pub(crate) struct Gate<'a> {
    pub(crate) scale: &'a Tensor,
    pub(crate) shift: &'a Tensor,
}

impl Gate<'_> {
    pub(super) fn values<A: WithDType>(self) -> Result<[Vec<A>; 2]> {
        Ok([self.scale.to_vec1()?, self.shift.to_vec1()?])
    }
}
