//! How long a collective takes, and whether it is right.
use crate::problem::Problem;
use candle_core::Tensor;
use candle_ddp::backend::Collective;
use candle_ddp::{ProcessGroup, ReduceOp, Result};
use std::time::Instant;

/// Measured between barriers, so that what disturbs one does not reach the others.
const BATCHES: usize = 5;

/// Seconds per call: the median over batches of a batch's mean, on the slowest rank.
pub(crate) fn time(
    pg: &ProcessGroup,
    problem: &Problem,
    warmup: u32,
    iters: Option<u32>,
    seconds_per_batch: f64,
) -> Result<f64> {
    let call = problem.call(pg.rank(), pg.device())?;
    // The first call on a size may set something up, so it does not count for the estimate.
    batch(pg, &call, 1)?;
    let estimate = slowest(pg, vec![batch(pg, &call, warmup)?])?[0];
    let iters = iters.unwrap_or((seconds_per_batch / estimate).clamp(3., 10_000.) as u32);
    let means = (0..BATCHES).map(|_| batch(pg, &call, iters)).collect::<Result<Vec<_>>>()?;
    let mut means = slowest(pg, means)?;
    means.sort_by(f64::total_cmp);
    Ok(means[means.len() / 2])
}

/// Mean seconds of `iters` calls. On a GPU, calls only enqueue: time begins and ends when its queue is empty.
fn batch(pg: &ProcessGroup, call: &Collective, iters: u32) -> Result<f64> {
    pg.barrier()?;
    pg.device().synchronize()?;
    let start = Instant::now();
    for _ in 0..iters {
        pg.run(call.clone())?;
    }
    pg.device().synchronize()?;
    Ok(start.elapsed().as_secs_f64() / f64::from(iters))
}

/// Each number's largest on any rank.
fn slowest(pg: &ProcessGroup, numbers: Vec<f64>) -> Result<Vec<f64>> {
    let len = numbers.len();
    let numbers = Tensor::from_vec(numbers, len, pg.device())?;
    pg.all_reduce(&numbers, ReduceOp::Max)?;
    Ok(numbers.to_vec1()?)
}

/// How many values come out wrong, on all ranks together.
pub(crate) fn errors(pg: &ProcessGroup, problem: &Problem) -> Result<u64> {
    let call = problem.call(pg.rank(), pg.device())?;
    pg.run(call.clone())?;
    let errors = Tensor::new(&[problem.errors(pg.rank(), &call)? as i64], pg.device())?;
    pg.all_reduce(&errors, ReduceOp::Sum)?;
    Ok(errors.to_vec1::<i64>()?[0] as u64)
}
