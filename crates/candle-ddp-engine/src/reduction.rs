use crate::call::Element;
use crate::reduce_op::ReduceOp;

/// The operation on the values of all ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reduction {
    pub(crate) element: Element,
    pub(crate) op: ReduceOp,
    /// The number of ranks for the mean of `Avg`, which may differ from the number of parts.
    pub(crate) ranks: usize,
}
