//! Guards that decide, while they live, how backward passes treat a model.
use crate::ddp::model::DistributedModel;
use std::fmt;
use std::sync::atomic::Ordering;

/// While it lives, gradients accumulate instead of being averaged
/// ([`DistributedDataParallel::no_sync`](crate::DistributedDataParallel::no_sync)), or a model's parameters get no gradients
/// ([`DistributedDataParallel::freeze`](crate::DistributedDataParallel::freeze)).
#[must_use = "it has an effect only as long as the guard lives"]
pub struct Guard<'a> {
    name: &'static str,
    model: &'a DistributedModel,
    end: fn(&DistributedModel),
}

impl<'a> Guard<'a> {
    pub(in crate::ddp) fn no_sync(model: &'a DistributedModel) -> Self {
        model.no_sync.fetch_add(1, Ordering::Relaxed);
        let end = |model: &DistributedModel| _ = model.no_sync.fetch_sub(1, Ordering::Relaxed);
        Self { name: "NoSync", model, end }
    }

    pub(in crate::ddp) fn freeze(model: &'a DistributedModel) -> Self {
        model.reducer.identity().freeze();
        Self { name: "Freeze", model, end: |model| model.reducer.identity().unfreeze() }
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        (self.end)(self.model);
    }
}

impl fmt::Debug for Guard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple(self.name).field(&self.model).finish()
    }
}
