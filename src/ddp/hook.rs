//! The replica of a parameter: what the model computes with, and how its gradient comes out of backward.
use super::reducer::Reducer;
use crate::Result;
use crate::tensor::{copy, function};
use candle_core::{DType, Tensor, Var};
use std::sync::Arc;

/// Makes the replica of `var`, of dtype `dtype`, whose gradient goes to `reducer` as that of parameter `index`.
///
/// candle has no hooks on backward, but an operation of one's own sees the gradient of its result exactly once, when it
/// is complete. So the model holds not the variable, but the result of such an operation on it: a copy, which
/// has to be brought up to date with the variable. The gradient is not stored for the variable: the reducer does so when
/// it is averaged.
pub(super) fn replicate(var: &Var, dtype: DType, reducer: Arc<Reducer>, index: usize) -> Result<Tensor> {
    let copy = copy::snapshot_tensor(var, dtype)?;
    let hook = move |gradient: &Tensor| Ok(reducer.autograd_hook(index, gradient)?);
    Ok(function::leaf(var, copy, hook)?)
}
