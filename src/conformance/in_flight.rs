//! Calls that start before earlier ones are complete.
use super::rank::{Fault, Outcome, Rank};
use crate::backend::{Collective, P2pOp, ReduceOp};
use candle_core::{DType, Tensor};

fn filled(rank: &Rank, value: f64, count: usize) -> Outcome<Tensor> {
    rank.full(DType::F32, count, value)
}

fn assert_all(rank: &Rank, tensor: &Tensor, value: f64) -> Outcome {
    rank.assert_equal(tensor, &filled(rank, value, tensor.elem_count())?)
}

fn sum(tensor: &Tensor) -> Collective {
    Collective::AllReduce { tensor: tensor.clone(), op: ReduceOp::Sum }
}

/// With a GPU engine, waiting for a later work on the GPU does not mean that this one is complete.
fn assert_over(rank: &Rank, work: &crate::Work) -> Outcome {
    if !rank.device.is_cpu() || work.is_completed() {
        return Ok(());
    }
    Err(Fault::new("a call completed before one that was started earlier"))
}

pub(super) fn in_order(rank: &Rank) -> Outcome {
    let world_size = rank.world_size() as f64;
    if !rank.is_small_world() {
        return Ok(());
    }
    let count = |index: usize| 1 + index * (rank.many() / 280 + 1);
    let tensors: Vec<Tensor> = (0..20).map(|index| filled(rank, index as f64, count(index))).collect::<Outcome<_>>()?;
    let start = || tensors.iter().map(|tensor| rank.start(sum(tensor))).collect::<Outcome<Vec<_>>>();
    // Twice on the same tensors.
    let (works, more) = (start()?, start()?);
    for index in (0..20).rev() {
        more[index].wait()?;
        assert_over(rank, &works[index])?;
        works[index].wait()?;
        assert_all(rank, &tensors[index], world_size * world_size * index as f64)?;
    }
    Ok(())
}

pub(super) fn dropped_work(rank: &Rank) -> Outcome {
    let tensor = filled(rank, 1.0, 5000)?;
    for _ in 0..4 {
        drop(rank.start(sum(&tensor))?);
    }
    rank.run(Collective::Barrier)?;
    assert_all(rank, &tensor, (rank.world_size() as f64).powi(4))
}

pub(super) fn run_after_start(rank: &Rank) -> Outcome {
    let tensor = filled(rank, 1.0, 10_000)?;
    // In f32, sums over up to 14 ranks are exact for six calls.
    for _ in 0..3 {
        let work = rank.start(sum(&tensor))?;
        rank.run(sum(&tensor))?;
        assert_over(rank, &work)?;
    }
    assert_all(rank, &tensor, (rank.world_size() as f64).powi(6))
}

pub(super) fn messages_pass_collectives(rank: &Rank) -> Outcome {
    if rank.world_size() == 1 {
        return Ok(());
    }
    let (tensor, message) = (filled(rank, 1.0, 100)?, filled(rank, 7.0 * rank.number() as f64, 100)?);
    match rank.number() {
        0 => {
            // Rank 1 joins this call only after it has received the message.
            let work = rank.start(sum(&tensor))?;
            rank.run(Collective::Recv { tensor: message.clone(), peer: 1 })?;
            rank.run(Collective::Send { tensor: message, peer: 1 })?;
            work.wait()?;
        }
        1 => {
            rank.run(Collective::Send { tensor: message.clone(), peer: 0 })?;
            rank.run(Collective::Recv { tensor: message.clone(), peer: 0 })?;
            assert_all(rank, &message, 7.0)?;
            rank.run(sum(&tensor))?;
        }
        _ => rank.run(sum(&tensor))?,
    }
    assert_all(rank, &tensor, rank.world_size() as f64)
}

pub(super) fn large_messages(rank: &Rank) -> Outcome {
    /// 12 MiB is more than the buffers at both ends of a connection hold together, which is 10 MiB on Linux.
    const COUNT: usize = 3 << 20;
    if !rank.is_small_world() {
        return Ok(());
    }
    let (before, next) = rank.neighbours();
    let sent = filled(rank, rank.number() as f64, COUNT)?;
    let received = filled(rank, 9.0, COUNT)?;
    let work = rank.start(Collective::Send { tensor: sent.clone(), peer: next })?;
    rank.run(Collective::Recv { tensor: received.clone(), peer: before })?;
    work.wait()?;
    assert_all(rank, &received, before as f64)?;
    let received = filled(rank, 9.0, COUNT)?;
    let recv = P2pOp::Recv { tensor: received.clone(), peer: before };
    rank.start_batch(vec![P2pOp::Send { tensor: sent, peer: next }, recv])?.wait()?;
    assert_all(rank, &received, before as f64)
}
