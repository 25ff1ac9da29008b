//! An adapter, and how layers find and compute it.
use crate::add::add;
use crate::autocast::{autocast, autocast_mode, to_dtype};
use crate::dropout::Dropout;
use crate::view::transpose;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, TensorId, Var};
use candle_ddp_tensor::Error;
use candle_ddp_tensor::function::is_grad_enabled;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, OnceLock, PoisonError, RwLock, RwLockWriteGuard, Weak};

/// The layer whose weight has an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// W (out, in) + s · B (out, r) · A (r, in).
    Linear,
    /// W (vectors, size) + s · (B (size, r) · A (r, vectors))ᵀ.
    Embedding,
    /// The same as a linear layer, with the kernel's extents in A, and extents of 1 in B.
    Convolution,
}

/// A frozen weight and the matrices that are added to it.
#[derive(Debug)]
pub(crate) struct Adapter {
    module: String,
    kind: Kind,
    base: Tensor,
    a: Tensor,
    b: Tensor,
    scaling: f64,
    dropout: Option<Dropout>,
    /// The stand-in, while it is listed in [`ADAPTERS`].
    listed: OnceLock<TensorId>,
}

/// The adapters of stand-ins, since candle does not reveal which operation made a tensor.
static ADAPTERS: LazyLock<RwLock<HashMap<TensorId, Weak<Adapter>>>> = LazyLock::new(RwLock::default);

fn adapters() -> RwLockWriteGuard<'static, HashMap<TensorId, Weak<Adapter>>> {
    ADAPTERS.write().unwrap_or_else(PoisonError::into_inner)
}

/// The adapter of a layer's weight, if it has one.
pub(crate) fn of(weight: &Tensor) -> Option<Arc<Adapter>> {
    // Bound first: this may be the last reference to the adapter, whose drop locks the list.
    let adapter = ADAPTERS.read().unwrap_or_else(PoisonError::into_inner).get(&weight.id()).cloned();
    adapter.and_then(|adapter| adapter.upgrade())
}

/// Refuses a weight with an adapter, in `what`.
pub(crate) fn refuse(weight: &Tensor, what: &str) -> Result<()> {
    match of(weight) {
        None => Ok(()),
        Some(adapter) => Err(adapter.unsupported(what)),
    }
}

impl Adapter {
    pub(super) fn new(module: &str, kind: Kind, base: Tensor, [a, b]: [Tensor; 2], (scaling, p): (f64, f32)) -> Self {
        let dropout = (p > 0.0).then(|| Dropout::new(p));
        let (module, base) = (module.to_string(), base.detach());
        Self { module, kind, base, a, b, scaling, dropout, listed: OnceLock::new() }
    }

    /// A tensor of the weight's shape by which layers find the adapter. It holds the adapter, and a single NaN.
    pub(super) fn stand_in(self) -> Result<Tensor> {
        let (shape, dtype, device) = (self.base.shape().clone(), self.base.dtype(), self.base.device().clone());
        let adapter = Arc::new(self);
        // candle keeps operations on variables only.
        let nan = Var::from_tensor(&Tensor::full(f32::NAN, 1, &device)?.to_dtype(dtype)?)?;
        let stand_in = nan.apply_op1(StandIn(Arc::clone(&adapter)))?.broadcast_as(shape)?;
        adapters().insert(stand_in.id(), Arc::downgrade(&adapter));
        let _ = adapter.listed.set(stand_in.id());
        Ok(stand_in)
    }

    /// The frozen weight.
    pub(crate) fn base(&self) -> &Tensor {
        &self.base
    }

    /// The matrices of shape (r, in) and (out, r) whose product, the second times the first, is added to the weight.
    pub(crate) fn matrices(&self) -> Result<[Tensor; 2]> {
        match self.kind {
            Kind::Embedding => Ok([transpose(&self.b, 0, 1)?, transpose(&self.a, 0, 1)?]),
            Kind::Linear | Kind::Convolution => Ok([self.a.clone(), self.b.clone()]),
        }
    }

    /// Both products of the adapter, with dropout before them. Those of f32 matrices with 16 bits run in these, as under autocast.
    pub(crate) fn multiplied(&self, x: &Tensor, products: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
        let x = match &self.dropout {
            Some(dropout) => dropout.forward(x, is_grad_enabled())?,
            None => x.clone(),
        };
        match x.dtype() {
            dtype @ (DType::F16 | DType::BF16) if autocast_mode().is_none() => autocast(dtype, || products(&x)),
            _ => products(&x),
        }
    }

    /// `narrow`, which has few elements, times the scaling.
    pub(crate) fn scaled(&self, narrow: &Tensor) -> Result<Tensor> {
        if self.scaling == 1.0 { Ok(narrow.clone()) } else { narrow.affine(self.scaling, 0.0) }
    }

    pub(crate) fn unsupported(&self, what: &str) -> candle_core::Error {
        let reason = format!("{} has an adapter, but {what} cannot compute with one: exclude it", self.module);
        Error::invalid("target_modules", reason).into()
    }
}

/// The sum of a layer's result and its adapter's, in the dtype of the first.
pub(crate) fn sum(y: &Tensor, delta: &Tensor) -> Result<Tensor> {
    add(y, &to_dtype(delta, y.dtype())?)
}

impl Drop for Adapter {
    fn drop(&mut self) {
        if let Some(id) = self.listed.get() {
            adapters().remove(id);
        }
    }
}

/// The operation from a NaN to a stand-in.
struct StandIn(Arc<Adapter>);

impl CustomOp1 for StandIn {
    fn name(&self) -> &'static str {
        "lora"
    }

    fn cpu_fwd(&self, nan: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((nan.try_clone(layout)?, layout.shape().clone()))
    }

    fn cuda_fwd(&self, nan: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        Ok((nan.try_clone(layout)?, layout.shape().clone()))
    }

    /// Called if something else than a layer has used the stand-in.
    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        Err(self.0.unsupported("an operation or layer other than candle-ddp-nn's, which the model uses,"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn an_adapter_lives_as_long_as_its_stand_in() {
        let zeros = |shape: (usize, usize)| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
        let matrices = [zeros((2, 5)), zeros((3, 2))];
        let adapter = Adapter::new("fc", Kind::Linear, zeros((3, 5)), matrices, (1.0, 0.0));
        let stand_in = adapter.stand_in().unwrap();
        let (id, tied) = (stand_in.id(), stand_in.clone());
        drop(stand_in);
        assert!(of(&tied).is_some() && of(&zeros((3, 5))).is_none());
        let adapter = Arc::downgrade(&of(&tied).unwrap());
        drop(tied);
        assert!(adapter.upgrade().is_none() && !adapters().contains_key(&id));
    }
}
