//! The stores of steps that are left out, and of those that will be if a verdict is bad.
use super::steps::Steps;
use super::verdict::Verdict;
use crate::Result;
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use std::sync::{Arc, OnceLock};

/// The key under which the store of a step that is left out has a tensor.
static SKIPPED: OnceLock<Var> = OnceLock::new();

/// The key under which the store of a step has the verdict on its gradients, if the host need not know it yet.
static LATE: OnceLock<Var> = OnceLock::new();

fn key(of: &OnceLock<Var>) -> Result<&Var> {
    if let Some(key) = of.get() {
        return Ok(key);
    }
    let key = Var::zeros((), DType::F32, &Device::Cpu)?;
    Ok(of.get_or_init(|| key))
}

/// Puts the verdict on the gradients of the model with these `steps` into their store.
pub(in crate::ddp) fn put_verdict(grads: &mut GradStore, steps: &Steps, numbers: Tensor) -> Result<Arc<Verdict>> {
    let verdict = Verdict::of(numbers.clone())?;
    steps.leave_out_if_bad(&verdict);
    put_numbers(grads, numbers)?;
    Ok(verdict)
}

/// The same, from the pair of a verdict that nobody else asks for.
pub(in crate::ddp) fn put_numbers(grads: &mut GradStore, numbers: Tensor) -> Result<()> {
    grads.insert(key(&LATE)?, numbers);
    Ok(())
}

/// The verdict on the gradients in the store, if the host need not know it yet, for one who follows it.
pub(crate) fn late_verdict(grads: &GradStore) -> Result<Option<Arc<Verdict>>> {
    let Some(numbers) = LATE.get().and_then(|key| grads.get(key)) else { return Ok(None) };
    let is_its = |verdict: &Arc<Verdict>| verdict.numbers().is_some_and(|own| own.id() == numbers.id());
    let known = Steps::of(grads).iter().filter_map(|model| model.late()).find(is_its);
    let verdict = known.map_or_else(|| Verdict::of(numbers.clone()), Ok)?;
    verdict.follow();
    Ok(Some(verdict))
}

/// Waits for the verdict on the gradients in the store, if there is one, and leaves out their step if it is bad.
pub(in crate::ddp) fn settle_store(grads: &mut GradStore) -> Result<()> {
    if let Some(verdict) = late_verdict(grads)? {
        if verdict.is_bad()? {
            return leave_out(grads);
        }
        grads.remove(key(&LATE)?);
    }
    Ok(())
}

/// Whether `grads` is what a backward pass has returned for a step that all ranks leave out.
pub(crate) fn is_skipped(grads: &GradStore) -> bool {
    SKIPPED.get().is_some_and(|key| grads.get(key).is_some())
}

/// Makes `grads` the store of a step that is left out.
pub(in crate::ddp) fn leave_out(grads: &mut GradStore) -> Result<()> {
    let key = key(&SKIPPED)?;
    *grads = GradStore::default();
    grads.insert(key, key.zeros_like()?);
    Ok(())
}
