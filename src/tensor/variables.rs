//! Variables as a `VarBuilder` hands them out, and choices among them.
use crate::error::describe;
use candle_core::{DType, Shape, Tensor};
use std::sync::Arc;

/// A choice among variables by their full names, such as `layer1.0.bn1.running_mean`.
pub type NamePredicate = Arc<dyn Fn(&str) -> bool + Send + Sync>;

/// A variable that was handed out as `tensor` is asked for once more (tied weights).
pub(crate) fn check_shared(name: &str, tensor: &Tensor, dtype: DType, shape: &Shape) -> candle_core::Result<()> {
    if tensor.shape() != shape {
        candle_core::bail!(
            "{name} was asked for as {} and as {}: a shared variable has one shape",
            describe(tensor.dtype(), tensor.shape()),
            describe(dtype, shape)
        )
    }
    Ok(())
}

/// A variable that is asked for without a shape has to be there.
pub(crate) fn not_in_varmap(name: &str) -> candle_core::Error {
    candle_core::Error::msg(format!("{name} is not in the VarMap: give its shape, with `get`, so that it can be made"))
}

/// Whether a variable's name says that it belongs to a batch norm's running statistics.
pub(crate) fn is_batch_norm_buffer(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or(name);
    ["running_mean", "running_var", "num_batches_tracked"].contains(&last)
}
