//! Values that were computed outside of candle's graph, attached to it with a backward pass of their own: for devices
//! on which an operation is made of candle's operations, but its gradient is not candle's.
use crate::tensor::copy::snapshot_tensor;
use crate::tensor::function::operation;
use candle_core::{Result, Tensor};

/// A copy of `value` that depends on `x`, whose gradient `backward` makes of the copy's.
pub(super) fn attach<F>(x: &Tensor, value: &Tensor, name: &'static str, backward: F) -> Result<Tensor>
where
    F: Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
{
    let backward = move |_: &Tensor, dy: &Tensor| Ok(vec![Some(backward(dy)?)]);
    operation(name, &[x], snapshot_tensor(value, value.dtype())?, backward)
}

/// The same for three tensors.
pub(super) fn attach3<F>(arguments: [&Tensor; 3], value: &Tensor, name: &'static str, backward: F) -> Result<Tensor>
where
    F: Fn(&Tensor) -> Result<[Tensor; 3]> + Send + Sync + 'static,
{
    let backward = move |_: &Tensor, dy: &Tensor| Ok(backward(dy)?.into_iter().map(Some).collect());
    operation(name, &arguments, snapshot_tensor(value, value.dtype())?, backward)
}
