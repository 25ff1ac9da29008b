//! Values whose graph also has a key, a scalar by which a backward pass or its store is known.
use crate::copy::{snapshot, snapshot_cuda};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp2, DType, Device, Layout, Result, Shape, Tensor, Var};
use parking_lot::Mutex;
use std::ops::Deref;

/// Keys that are variables, one for each device.
#[derive(Debug)]
pub struct Keys(Mutex<Vec<Var>>);

impl Keys {
    /// No keys.
    #[allow(clippy::new_without_default, reason = "it makes a static")]
    pub const fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    /// The key on a device.
    pub fn of(&self, device: &Device) -> Result<Var> {
        let mut keys = self.0.lock();
        if let Some(key) = keys.iter().find(|key| key.device().same_device(device)) {
            return Ok(key.clone());
        }
        let key = Var::zeros((), DType::F32, device)?;
        keys.push(key.clone());
        Ok(key)
    }

    /// The keys of all devices so far.
    pub fn all(&self) -> impl Deref<Target = Vec<Var>> + '_ {
        self.0.lock()
    }
}

/// The gradients of a value and its key.
type Gradients = Result<(Option<Tensor>, Option<Tensor>)>;

/// A copy of `x`, in whose graph there is also `key`. `backward` gets the key and the gradient of the copy.
pub fn keyed(
    name: &'static str,
    x: &Tensor,
    key: &Tensor,
    backward: impl Fn(&Tensor, &Tensor) -> Gradients + Send + Sync + 'static,
) -> Result<Tensor> {
    x.apply_op2(key, Keyed { name, backward })
}

struct Keyed<F> {
    name: &'static str,
    backward: F,
}

impl<F: Fn(&Tensor, &Tensor) -> Gradients> CustomOp2 for Keyed<F> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        snapshot(x, layout, x.dtype())
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        snapshot_cuda(x, layout, x.dtype())
    }

    fn bwd(&self, _: &Tensor, key: &Tensor, _: &Tensor, gradient: &Tensor) -> Gradients {
        (self.backward)(key, gradient)
    }
}
