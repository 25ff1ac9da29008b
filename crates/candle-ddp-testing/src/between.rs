//! Operations that act in the middle of a backward pass.
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, Layout, Result, Shape, Tensor};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The identity. Its backward pass calls this, between the gradients of the layers behind and before it.
#[derive(Debug)]
pub struct Between<F>(pub F);

impl<F: Fn() -> Result<()>> CustomOp1 for Between<F> {
    fn name(&self) -> &'static str {
        "between"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        assert!(layout.is_contiguous() && layout.start_offset() == 0);
        Ok((storage.clone(), layout.shape().clone()))
    }

    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        Ok((storage.try_clone(layout)?, layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        (self.0)()?;
        Ok(Some(gradient.clone()))
    }
}

/// The identity. Its backward pass fails while the flag is set.
pub fn failing(flag: &Arc<AtomicBool>) -> Between<impl Fn() -> Result<()> + Send + Sync + 'static> {
    let flag = Arc::clone(flag);
    Between(move || match flag.load(Ordering::Relaxed) {
        true => candle_core::bail!("out of memory"),
        false => Ok(()),
    })
}
