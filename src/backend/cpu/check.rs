//! Checks on the calling thread before anything is sent.
use crate::Result;
use crate::backend::{Collective, P2pOp, batch, check};
use candle_core::Tensor;
use candle_ddp_engine::{Call, Channel};

/// Checks the tensors and arguments of `collective` on one rank of a group.
pub(super) fn check(rank: usize, world_size: usize, collective: &Collective) -> Result<(Call, Channel)> {
    check::check(rank, world_size, &on_cpu, collective)
}

/// The same for the messages of a batch.
pub(super) fn check_batch(rank: usize, world_size: usize, batch: &[P2pOp]) -> Result<Vec<(Call, Channel)>> {
    batch::check_batch(rank, world_size, &on_cpu, batch)
}

fn on_cpu(tensor: &Tensor) -> std::result::Result<(), String> {
    if tensor.device().is_cpu() {
        return Ok(());
    }
    Err(format!(
        "is on {:?}: the CPU engine takes CPU tensors; move it with to_device(&Device::Cpu), or use a group of the NCCL \
         engine",
        tensor.device().location()
    ))
}
