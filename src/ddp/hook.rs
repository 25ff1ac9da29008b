//! The replica of a parameter: the model computes with it, and its gradient leaves the backward pass through it.
use super::graph::Registration;
use super::reducer::Reducer;
use crate::Result;
use crate::tensor::{copy, function};
use candle_core::{DType, Tensor, Var};
use std::sync::{Arc, OnceLock};

/// Creates the replica of `var` in the dtype `dtype`; its gradient goes to `reducer` as the gradient of parameter
/// `index`, called `name`.
///
/// candle has no backward hooks, but a custom operation sees the gradient of its result exactly once, when it is
/// complete. So the model holds the result of such an operation on the variable: a copy, which must be kept up to date.
/// The gradient is not stored for the variable; the reducer does that once it is averaged.
pub(super) fn replicate(var: &Var, dtype: DType, reducer: Arc<Reducer>, index: usize, name: &str) -> Result<Tensor> {
    let copy = copy::snapshot_tensor(var, dtype)?;
    let registration = Arc::<OnceLock<Registration>>::default();
    let model = Arc::clone(reducer.identity());
    let held = Arc::clone(&registration);
    let hook = move |gradient: &Tensor| {
        // The registration ends with the replica.
        let _held = &held;
        reducer.autograd_hook(index, gradient)
    };
    let (replica, token) = function::leaf(var, copy, hook)?;
    // Every graph that uses the replica contains its token, but not always the replica itself.
    registration.get_or_init(|| Registration::new(&token, &model, name));
    Ok(replica)
}
