//! The memory of buckets and gradients.
use super::Reducer;
use crate::ddp::reduction::Reduction;
use candle_core::{DType, DeviceLocation};
use std::cmp::Reverse;

impl Reducer {
    /// For each bucket with memory, the bytes of gradients that are not views of it, and its own. Under ZeRO, the parameters are gathered
    /// in the dtype `gathered` of their variables.
    pub(crate) fn memory(&self, gathered: impl Fn(usize) -> DType) -> Vec<(DeviceLocation, usize, usize)> {
        let state = self.lock();
        let mut all = Vec::new();
        // The bytes of the buckets of which ZeRO has two at a time.
        let mut in_turn = Vec::new();
        for bucket in &state.buckets {
            let (dtype, device) = (bucket.tensor.dtype(), bucket.tensor.device().location());
            let (first, parts) = (bucket.members[0], bucket.cut.length());
            let own = bucket.length() * dtype.size_in_bytes();
            let to_gather = parts * gathered(first).size_in_bytes();
            let leaves_as = state.parameters[first].leaves_as;
            let sums = state.reduction.tree().map_or(0, |tree| tree.elements(bucket, self.groups.main()));
            let sums = sums * dtype.size_in_bytes();
            match &state.reduction {
                _ if state.reduction.adds_up_parts() => {
                    all.push((device, parts / self.groups.within().world_size() * dtype.size_in_bytes(), 0));
                    in_turn.push((own.max(to_gather), device));
                }
                Reduction::Shard(_) => {
                    all.push((device, 0, own + sums));
                    in_turn.push((to_gather, device));
                }
                _ if leaves_as != dtype => {
                    all.push((device, bucket.cut.elements() * leaves_as.size_in_bytes(), own + sums))
                }
                _ => all.push((device, 0, own + sums)),
            }
        }
        in_turn.sort_by_key(|(bytes, _)| Reverse(*bytes));
        all.extend(in_turn.into_iter().take(2).map(|(bytes, device)| (device, 0, bytes)));
        all
    }
}
