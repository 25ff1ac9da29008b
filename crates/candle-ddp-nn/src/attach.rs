//! Values that were computed outside of candle's graph, with a backward pass: for devices on which a function is made of
//! candle's operations, but its gradient is not candle's.
use candle_core::{Result, Tensor};
use candle_ddp_tensor::copy::snapshot_tensor;
use candle_ddp_tensor::function::{Function, apply};

/// A copy of `value` that depends on `arguments`, whose gradients `backward` makes of the copy's.
pub(super) fn attach<F>(arguments: &[&Tensor], value: &Tensor, name: &'static str, backward: F) -> Result<Tensor>
where
    F: Fn(&Tensor) -> Result<Vec<Tensor>> + Send + Sync + 'static,
{
    if !arguments.iter().any(|argument| argument.track_op()) {
        return Ok(value.detach());
    }
    let copy = snapshot_tensor(value, value.dtype())?;
    apply(arguments, copy, Attached { name, backward })
}

struct Attached<F> {
    name: &'static str,
    backward: F,
}

impl<F: Fn(&Tensor) -> Result<Vec<Tensor>> + Send + Sync + 'static> Function for Attached<F> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn backward(&self, gradient: &Tensor, _: &[bool]) -> Result<Vec<Option<Tensor>>> {
        Ok((self.backward)(gradient)?.into_iter().map(Some).collect())
    }
}
