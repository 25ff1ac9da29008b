//! Values that were computed outside candle's graph, with their own backward pass: for devices on which candle's
//! operations compute a function but not its gradient.
use candle_core::{Result, Tensor};
use candle_ddp_tensor::copy::snapshot_tensor;
use candle_ddp_tensor::function::{Function, apply, is_tracked};

/// A copy of `value` that depends on `arguments`. `backward` computes their gradients from the copy's.
pub(super) fn attach<F>(arguments: &[&Tensor], value: &Tensor, name: &'static str, backward: F) -> Result<Tensor>
where
    F: Fn(&Tensor) -> Result<Vec<Tensor>> + Send + Sync + 'static,
{
    if !arguments.iter().any(|argument| is_tracked(argument)) {
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
