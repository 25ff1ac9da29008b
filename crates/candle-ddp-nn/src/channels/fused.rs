//! The operations that a normalisation fuses into its pass over memory.
use candle_core::{Result, Tensor, WithDType};

/// The operation after a normalisation, in the same pass over memory.
pub(crate) enum After {
    Nothing,
    Relu,
    /// A tensor of the same shape and dtype, contiguous, is added first.
    AddRelu(Tensor),
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
