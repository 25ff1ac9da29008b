//! Guards that decide, while they live, how backward passes treat a model.
use crate::ddp::model::DistributedModel;
use std::sync::atomic::Ordering;

/// While this guard lives, gradients accumulate instead of being averaged: see
/// [`DistributedDataParallel::no_sync`](crate::DistributedDataParallel::no_sync).
#[derive(Debug)]
#[must_use = "gradients are synchronised again as soon as the guard is dropped"]
pub struct NoSync<'a>(&'a DistributedModel);

impl<'a> NoSync<'a> {
    pub(in crate::ddp) fn begin(core: &'a DistributedModel) -> Self {
        core.no_sync.fetch_add(1, Ordering::Relaxed);
        Self(core)
    }
}

impl Drop for NoSync<'_> {
    fn drop(&mut self) {
        self.0.no_sync.fetch_sub(1, Ordering::Relaxed);
    }
}

/// While this guard lives, a model's parameters get no gradients: see
/// [`DistributedDataParallel::freeze`](crate::DistributedDataParallel::freeze).
#[derive(Debug)]
#[must_use = "the model's parameters get gradients again as soon as the guard is dropped"]
pub struct Freeze<'a>(&'a DistributedModel);

impl<'a> Freeze<'a> {
    pub(in crate::ddp) fn begin(core: &'a DistributedModel) -> Self {
        core.reducer.identity().freeze();
        Self(core)
    }
}

impl Drop for Freeze<'_> {
    fn drop(&mut self) {
        self.0.reducer.identity().unfreeze();
    }
}
