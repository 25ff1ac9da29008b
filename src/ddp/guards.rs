//! Guards that decide, while they live, what backward passes do with a model.
use super::core::Core;
use std::sync::atomic::Ordering;

/// While this guard lives, gradients accumulate instead of being averaged: see
/// [`DistributedDataParallel::no_sync`](crate::DistributedDataParallel::no_sync).
#[must_use = "gradients are synchronised again as soon as the guard is dropped"]
pub struct NoSync<'a>(&'a Core);

impl<'a> NoSync<'a> {
    pub(super) fn begin(core: &'a Core) -> Self {
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
#[must_use = "the model's parameters get gradients again as soon as the guard is dropped"]
pub struct Freeze<'a>(&'a Core);

impl<'a> Freeze<'a> {
    pub(super) fn begin(core: &'a Core) -> Self {
        core.reducer.identity().freeze();
        Self(core)
    }
}

impl Drop for Freeze<'_> {
    fn drop(&mut self) {
        self.0.reducer.identity().unfreeze();
    }
}
