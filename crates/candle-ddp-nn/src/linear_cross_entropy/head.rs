//! The arguments of both implementations.
use candle_core::{Result, Tensor};
use candle_ddp_tensor::function::is_tracked;

/// The contiguous arguments of a linear layer, and the number of rows that are multiplied at a time.
pub(super) struct Head<'a> {
    pub(super) x: &'a Tensor,
    pub(super) weight: &'a Tensor,
    pub(super) bias: Option<&'a Tensor>,
    pub(super) chunk: usize,
}

impl<'a> Head<'a> {
    /// Rows, features and classes.
    pub(super) fn extents(&self) -> Result<(usize, usize, usize)> {
        let (classes, features) = self.weight.dims2()?;
        Ok((self.x.dims()[..self.x.rank() - 1].iter().product(), features, classes))
    }

    pub(super) fn arguments(&self) -> Vec<&'a Tensor> {
        [self.x, self.weight].into_iter().chain(self.bias).collect()
    }

    /// Whether a backward pass may ask for the gradients of the arguments.
    pub(super) fn needed(&self) -> [bool; 3] {
        [is_tracked(self.x), is_tracked(self.weight), self.bias.is_some_and(is_tracked)]
    }
}
