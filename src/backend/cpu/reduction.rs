use crate::backend::ReduceOp;
use crate::backend::call::Element;

/// What is done to the values of all ranks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reduction {
    pub(super) element: Element,
    pub(super) op: ReduceOp,
    /// Of how many ranks `Avg` is the mean: not always as many as there are parts.
    pub(super) ranks: usize,
}
