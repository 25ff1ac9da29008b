//! Variables returned by a `VarBuilder`, and predicates on their names.
use crate::error::describe;
use candle_core::{DType, Shape, Tensor};
use std::sync::Arc;

/// A predicate on the full names of variables, such as `layer1.0.bn1.running_mean`.
pub type NamePredicate = Arc<dyn Fn(&str) -> bool + Send + Sync>;

/// Checks that a variable handed out as `tensor` is requested again with the same shape and dtype (tied weights).
pub(crate) fn check_shared(name: &str, tensor: &Tensor, dtype: DType, shape: &Shape) -> candle_core::Result<()> {
    if tensor.shape() != shape {
        candle_core::bail!(
            "{name} was requested as {} and as {}: a shared variable must have one shape and dtype",
            describe(tensor.dtype(), tensor.shape()),
            describe(dtype, shape)
        )
    }
    Ok(())
}

/// The error for a variable that is requested without a shape and does not exist.
pub(crate) fn not_in_varmap(name: &str) -> candle_core::Error {
    candle_core::Error::msg(format!(
        "{name} is not in the VarMap: request it with its shape, by `get`, so that it can \
                                     be created"
    ))
}

/// The error for a variable that a second model of the same variables requests, and the first does not have.
pub(crate) fn not_in_model(name: &str) -> candle_core::Error {
    candle_core::Error::msg(format!("{name} is not a variable of the model: build the same model, with the same names"))
}

/// Whether a variable's name is that of a batch norm's running statistics.
pub(crate) fn is_batch_norm_buffer(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or(name);
    ["running_mean", "running_var", "num_batches_tracked"].contains(&last)
}
