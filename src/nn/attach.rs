//! Values that were computed outside of candle's graph, attached to it with a backward pass of their own: for devices
//! on which an operation is made of candle's operations, but its gradient is not candle's.
use crate::tensor::copy::snapshot;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, CustomOp3, Layout, Result, Shape, Storage, Tensor};

/// A copy of `value` that depends on `x`, whose gradient `backward` makes of the copy's.
pub(super) fn attach<F>(x: &Tensor, value: &Tensor, name: &'static str, backward: F) -> Result<Tensor>
where
    F: Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
{
    let value = value.detach();
    if !x.track_op() {
        return Ok(value);
    }
    x.apply_op1(Attached { name, value, backward })
}

/// The same for three tensors.
pub(super) fn attach3<F>([a, b, c]: [&Tensor; 3], value: &Tensor, name: &'static str, backward: F) -> Result<Tensor>
where
    F: Fn(&Tensor) -> Result<[Tensor; 3]> + Send + Sync + 'static,
{
    let value = value.detach();
    if ![a, b, c].iter().any(|t| t.track_op()) {
        return Ok(value);
    }
    a.apply_op3(b, c, Attached { name, value, backward })
}

struct Attached<F> {
    name: &'static str,
    value: Tensor,
    backward: F,
}

impl<F> Attached<F> {
    fn on_cpu(&self) -> Result<(CpuStorage, Shape)> {
        match self.value.storage_and_layout() {
            (guard, layout) => match &*guard {
                Storage::Cpu(value) => snapshot(value, layout, self.value.dtype()),
                _ => self.elsewhere(),
            },
        }
    }

    fn on_gpu(&self) -> Result<(CudaStorage, Shape)> {
        match self.value.storage_and_layout() {
            (guard, layout) => match &*guard {
                Storage::Cuda(value) => snapshot(value, layout, self.value.dtype()),
                _ => self.elsewhere(),
            },
        }
    }

    fn elsewhere<T>(&self) -> Result<T> {
        candle_core::bail!("{}: its result is on another device than its input", self.name)
    }
}

impl<F: Fn(&Tensor) -> Result<Tensor> + Send + Sync> CustomOp1 for Attached<F> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.on_cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        self.on_gpu()
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some((self.backward)(&gradient.detach())?))
    }
}

impl<F: Fn(&Tensor) -> Result<[Tensor; 3]> + Send + Sync> CustomOp3 for Attached<F> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.on_cpu()
    }

    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.on_gpu()
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [a, b, c] = (self.backward)(&gradient.detach())?;
        Ok((Some(a), Some(b), Some(c)))
    }
}
