//! Inputs of models that are variables: a program that makes one wants its gradient, which carries no graph.
use super::grad_mode::is_grad_enabled;
use super::keyed::{Keys, keyed};
use crate::copy::{snapshot, snapshot_cuda};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, Layout, Result, Shape, Tensor, TensorId};

/// The reason why no loss may depend on a gradient.
pub const NO_SECOND_ORDER: &str = "it depends on a gradient of an earlier backward pass. candle gives gradients no graph, or only \
    the graph of one operation, so this part of the loss would train nothing, or wrongly. For a gradient penalty take a finite \
    difference (\"Gradient penalties\" in candle-ddp's guide to migration); if the gradient is meant as a constant, call `detach()` on it";

/// A loss whose graph has one depends on the gradient of an [`input`].
static KEYS: Keys = Keys::new();

/// `x`, or a copy if it is a variable: no backward pass goes through the variable's gradient, and a graph that contains the gradient is
/// known by [`is_input_gradient`].
pub fn input(x: &Tensor) -> Result<Tensor> {
    let is_seen = x.is_variable() && x.dtype().is_float() && is_grad_enabled() && !x.device().is_metal();
    if is_seen { x.apply_op1(Input) } else { Ok(x.clone()) }
}

/// Whether `id` identifies a variable on which the gradients of inputs depend.
pub fn is_input_gradient(id: TensorId) -> bool {
    KEYS.all().iter().any(|key| key.id() == id)
}

struct Input;

impl CustomOp1 for Input {
    fn name(&self) -> &'static str {
        "input"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        snapshot(x, layout, x.dtype())
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        snapshot_cuda(x, layout, x.dtype())
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let key = KEYS.of(gradient.device())?;
        let refuse = |_: &Tensor, _: &Tensor| candle_core::bail!("the loss must be another: {NO_SECOND_ORDER}");
        keyed("input-gradient", &gradient.detach(), key.as_tensor(), refuse).map(Some)
    }
}
