//! Tells gradients that are still multiplied by the scale of a `GradScaler`, which nothing may use before they are divided.
//!
//! The scaled loss also depends on a variable, the key, which gets a gradient of zero like every other variable of the graph: so
//! the store of any backward pass from that loss has it, also of candle's own.
use crate::backend::Purpose;
use crate::process_group::ProcessGroup;
use crate::tensor::function::{Keys, keyed};
use crate::{Error, ReduceOp, Result};
use candle_core::backprop::GradStore;
use candle_core::{Tensor, TensorId};

pub(crate) static UNSCALE: Purpose = Purpose::of("GradScaler::unscale");

static KEYS: Keys = Keys::new();

/// The same loss; stores with its gradients are known to be [scaled](is_scaled).
pub(crate) fn mark(loss: &Tensor) -> candle_core::Result<Tensor> {
    if loss.device().is_metal() {
        return Ok(loss.clone());
    }
    let key = KEYS.of(loss.device())?;
    keyed("scaled-loss", loss, key.as_tensor(), |key, gradient| Ok((Some(gradient.clone()), Some(key.zeros_like()?))))
}

/// Whether `id` is the key's: the graph of a scaled loss contains it.
pub(crate) fn is_key(id: TensorId) -> bool {
    KEYS.all().iter().any(|key| key.id() == id)
}

fn is_scaled(grads: &GradStore) -> bool {
    KEYS.all().iter().any(|key| grads.get(key).is_some())
}

/// Call once the gradients are divided.
pub(crate) fn unmark(grads: &mut GradStore) {
    KEYS.all().iter().for_each(|key| drop(grads.remove(key)));
}

/// Makes `to` scaled if `from` is.
pub(in crate::ddp) fn pass_on(from: &mut GradStore, to: &mut GradStore) {
    for key in KEYS.all().iter() {
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
    UNSCALE.during(|| group.all_reduce(&pair, ReduceOp::Sum))?;
    let pair = pair.to_vec1::<f64>()?;
    Ok([pair[1].is_nan(), pair[0] > 0.])
}
