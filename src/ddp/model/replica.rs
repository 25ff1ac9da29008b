//! The replica of a parameter: the model computes with it, and its gradient leaves the backward pass through it.
use crate::Result;
use crate::ddp::pass::graph::Registration;
use crate::ddp::reducer::Reducer;
use crate::tensor::function;
use candle_core::{Shape, Storage, Tensor, Var};
use std::sync::{Arc, OnceLock};

/// Creates a replica of `copy`; its gradient goes to `reducer` as the gradient of parameter `index`, called `name`. `var` is the
/// parameter's variable, or stands for it in candle's graph.
///
/// candle has no backward hooks, but a custom operation sees the gradient of its result exactly once, when it is
/// complete. So the model holds the result of such an operation on the variable: a copy, which must be kept up to date.
/// The gradient is not stored for the variable; the reducer does that once it is averaged.
pub(in crate::ddp) fn replicate(
    var: &Var,
    copy: (Storage, Shape),
    reducer: Arc<Reducer>,
    index: usize,
    name: &str,
) -> Result<Tensor> {
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
