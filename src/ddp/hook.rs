//! The replica of a parameter: what the model computes with, and how its gradient comes out of backward.
use super::graph::Registration;
use super::reducer::Reducer;
use crate::Result;
use crate::tensor::{copy, function};
use candle_core::{DType, Tensor, Var};
use std::sync::{Arc, OnceLock};

/// Makes the replica of `var`, of dtype `dtype`, whose gradient goes to `reducer` as that of parameter `index`, `name`.
///
/// candle has no hooks on backward, but an operation of one's own sees the gradient of its result exactly once, when it
/// is complete. So the model holds not the variable, but the result of such an operation on it: a copy, which
/// has to be brought up to date with the variable. The gradient is not stored for the variable: the reducer does so when
/// it is averaged.
pub(super) fn replicate(var: &Var, dtype: DType, reducer: Arc<Reducer>, index: usize, name: &str) -> Result<Tensor> {
    let copy = copy::snapshot_tensor(var, dtype)?;
    let registration = Arc::<OnceLock<Registration>>::default();
    let model = Arc::clone(reducer.identity());
    let held = Arc::clone(&registration);
    let hook = move |gradient: &Tensor| {
        // It ends with the replica.
        let _held = &held;
        reducer.autograd_hook(index, gradient)
    };
    let (replica, token) = function::leaf(var, copy, hook)?;
    // Every graph that uses the replica contains its token, but not always the replica itself.
    registration.get_or_init(|| Registration::new(&token, &model, name));
    Ok(replica)
}
