//! The replica of a parameter: what the model computes with, and how its gradient comes out of backward.
use super::graph::Registration;
use super::reducer::Reducer;
use crate::Result;
use crate::tensor::copy;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Layout, Shape, Tensor, Var};
use std::sync::{Arc, OnceLock};

/// Makes the replica of `var`, of dtype `dtype`, whose gradient goes to `reducer` as that of parameter `index`, `name`.
///
/// candle has no hooks on backward, but an operation of one's own sees the gradient of its result exactly once, when it
/// is complete. So the model holds not the variable, but the result of such an operation on it: a copy, which
/// has to be brought up to date with the variable.
pub(super) fn replicate(var: &Var, dtype: DType, reducer: Arc<Reducer>, index: usize, name: &str) -> Result<Tensor> {
    let registration = Arc::<OnceLock<Registration>>::default();
    let model = Arc::clone(reducer.identity());
    let replica = var.apply_op1(GradHook { reducer, index, dtype, registration: Arc::clone(&registration) })?;
    registration.get_or_init(|| Registration::new(&replica, &model, name));
    Ok(replica)
}

struct GradHook {
    reducer: Arc<Reducer>,
    index: usize,
    dtype: DType,
    /// Of the replica: it ends with it.
    #[expect(dead_code, reason = "it is there to be dropped")]
    registration: Arc<OnceLock<Registration>>,
}

impl CustomOp1 for GradHook {
    fn name(&self) -> &'static str {
        "ddp-replica"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        copy::snapshot(storage, layout, self.dtype)
    }

    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        copy::snapshot(storage, layout, self.dtype)
    }

    /// Hands the gradient over. Returning `None` keeps candle from storing it for the variable: the reducer does so
    /// when it is averaged.
    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> candle_core::Result<Option<Tensor>> {
        self.reducer.autograd_hook(self.index, gradient)?;
        Ok(None)
    }
}
