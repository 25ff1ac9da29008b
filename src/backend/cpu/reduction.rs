use crate::backend::ReduceOp;
use crate::backend::call::Element;

/// The operation on the values of all ranks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reduction {
    pub(super) element: Element,
    pub(super) op: ReduceOp,
    /// The number of ranks for the mean of `Avg`, which may differ from the number of parts.
    pub(super) ranks: usize,
}
