//! Tells gradients that are still multiplied by the scale of a `GradScaler`, which nothing may use before they are divided.
//!
//! The scaled loss also depends on a variable, the key, which gets a gradient of zero like every other variable of the graph: so
//! the store of any backward pass from that loss has it, also of candle's own.
use crate::backend::label;
use crate::panic::lock;
use crate::process_group::ProcessGroup;
use crate::tensor::copy::snapshot;
use crate::{Error, ReduceOp, Result};
use candle_core::backend::BackendStorage;
use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, CudaStorage, CustomOp2, DType, Device, Layout, Shape, Tensor, TensorId, Var};
use std::sync::Mutex;

/// One key for each device.
static KEYS: Mutex<Vec<Var>> = Mutex::new(Vec::new());

fn key(device: &Device) -> candle_core::Result<Var> {
    let mut keys = lock(&KEYS);
    if let Some(key) = keys.iter().find(|key| key.device().same_device(device)) {
        return Ok(key.clone());
    }
    let key = Var::zeros((), DType::F32, device)?;
    keys.push(key.clone());
    Ok(key)
}

/// The same loss; stores with its gradients are known to be [scaled](is_scaled).
pub(crate) fn mark(loss: &Tensor) -> candle_core::Result<Tensor> {
    if loss.device().is_metal() {
        return Ok(loss.clone());
    }
    loss.apply_op2(key(loss.device())?.as_tensor(), Marked)
}

/// Whether `id` is the key's: the graph of a scaled loss contains it.
pub(crate) fn is_key(id: TensorId) -> bool {
    lock(&KEYS).iter().any(|key| key.id() == id)
}

fn is_scaled(grads: &GradStore) -> bool {
    lock(&KEYS).iter().any(|key| grads.get(key).is_some())
}

/// Call once the gradients are divided.
pub(crate) fn unmark(grads: &mut GradStore) {
    lock(&KEYS).iter().for_each(|key| drop(grads.remove(key)));
}

/// Makes `to` scaled if `from` is.
pub(in crate::ddp) fn pass_on(from: &mut GradStore, to: &mut GradStore) {
    for key in lock(&KEYS).iter() {
        if let Some(mark) = from.remove(key) {
            to.insert(key, mark);
        }
    }
}

/// Refuses gradients that are still scaled.
///
/// # Errors
/// [`Error::GradScaler`] in the name of `call`.
pub(crate) fn check_unscaled(grads: &GradStore, call: &'static str) -> Result<()> {
    if !is_scaled(grads) {
        return Ok(());
    }
    let reason =
        "the gradients are still multiplied by the scale: call `optimizer.unscale(&mut scaler, &mut grads)` before \
                  anything inspects or clips them, and step with `scaler.step(&mut optimizer, &mut grads)`"
            .to_string();
    Err(Error::GradScaler { call, reason })
}

/// Whether there is an overflow, and whether a loss was scaled, on any rank. Every rank makes this call.
pub(crate) fn share_verdict(group: &ProcessGroup, [overflow, has_scaled]: [bool; 2]) -> Result<[bool; 2]> {
    if group.world_size() == 1 {
        return Ok([overflow, has_scaled]);
    }
    let pair = [f64::from(u8::from(has_scaled)), if overflow { f64::NAN } else { 0. }];
    let pair = Tensor::new(&pair, group.device())?;
    label::UNSCALE.during(|| group.all_reduce(&pair, ReduceOp::Sum))?;
    let pair = pair.to_vec1::<f64>()?;
    Ok([pair[1].is_nan(), pair[0] > 0.])
}

struct Marked;

impl CustomOp2 for Marked {
    fn name(&self) -> &'static str {
        "scaled-loss"
    }

    fn cpu_fwd(
        &self,
        loss: &CpuStorage,
        layout: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        snapshot(loss, layout, loss.dtype())
    }

    fn cuda_fwd(
        &self,
        loss: &CudaStorage,
        layout: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        snapshot(loss, layout, loss.dtype())
    }

    fn bwd(
        &self,
        _: &Tensor,
        key: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        Ok((Some(gradient.clone()), Some(key.zeros_like()?)))
    }
}
