//! Slices of one tensor in several calls at once.
use super::rank::{Outcome, Rank};
use crate::backend::{Collective, ReduceOp};
use candle_core::{DType, Tensor};

/// A small and a large count.
fn counts(rank: &Rank) -> [usize; 2] {
    [10, rank.many()]
}

/// `from`, `from` + 1, ….
fn ramp(rank: &Rank, from: usize, count: usize) -> Outcome<Tensor> {
    let ramp = Tensor::arange(0, count as u32, &candle_core::Device::Cpu)?;
    Ok((ramp.to_dtype(DType::F32)? + from as f64)?.to_device(rank.device)?)
}

/// Each rank sends the inner part of its tensor to the next rank, which receives it into the part before its own.
pub(super) fn halos(rank: &Rank) -> Outcome {
    if !rank.is_small_world() {
        return Ok(());
    }
    let (before, next) = rank.neighbours();
    for count in counts(rank) {
        let field = ramp(rank, 1000 * rank.number(), 3 * count)?;
        let part = |index: usize| field.narrow(0, index * count, count);
        let halo = rank.start(Collective::Recv { tensor: part(0)?, peer: before })?;
        let inner = rank.start(Collective::Send { tensor: part(1)?, peer: next })?;
        halo.wait()?;
        inner.wait()?;
        rank.assert_equal(&part(0)?, &ramp(rank, 1000 * before + count, count)?)?;
        rank.assert_equal(&part(2)?, &ramp(rank, 1000 * rank.number() + 2 * count, count)?)?;
    }
    Ok(())
}

pub(super) fn two_groups(rank: &Rank) -> Outcome {
    if !rank.is_small_world() {
        return Ok(());
    }
    let world_size = rank.world_size();
    for count in counts(rank) {
        let whole = rank.full(DType::F32, 2 * count, rank.number() as f64 + 1.0)?;
        let order = if rank.number() == 0 { [0, 1] } else { [1, 0] };
        let start = |half: usize| -> Outcome<_> {
            let (tensor, op) = (whole.narrow(0, half * count, count)?, [ReduceOp::Sum, ReduceOp::Max][half]);
            Ok(rank.groups[half].start(Collective::AllReduce { tensor, op })?)
        };
        for work in [start(order[0])?, start(order[1])?] {
            work.wait()?;
        }
        let sum = (world_size * (world_size + 1) / 2) as f64;
        for (half, value) in [sum, world_size as f64].into_iter().enumerate() {
            rank.assert_equal(&whole.narrow(0, half * count, count)?, &rank.full(DType::F32, count, value)?)?;
        }
    }
    Ok(())
}
