//! Measuring a collective and checking its results.
use crate::problem::Problem;
use candle_core::Tensor;
use candle_ddp::backend::Collective;
use candle_ddp::{ProcessGroup, ReduceOp, Result};
use std::time::Instant;

/// The number of batches, with barriers between them, so that a disturbance of one does not affect the others.
const BATCHES: usize = 5;

/// Returns the seconds per call: the median over batches of a batch's mean, on the slowest rank.
pub(crate) fn time(
    pg: &ProcessGroup,
    problem: &Problem,
    warmup: u32,
    iters: Option<u32>,
    seconds_per_batch: f64,
) -> Result<f64> {
    let call = problem.call(pg.rank(), pg.device())?;
    // The first call with a size may set something up, so the estimate ignores it.
    batch(pg, &call, 1)?;
    let estimate = slowest(pg, vec![batch(pg, &call, warmup)?])?[0];
    let iters = iters.unwrap_or((seconds_per_batch / estimate).clamp(3., 10_000.) as u32);
    let means = (0..BATCHES).map(|_| batch(pg, &call, iters)).collect::<Result<Vec<_>>>()?;
    let mut means = slowest(pg, means)?;
    means.sort_by(f64::total_cmp);
    Ok(means[means.len() / 2])
}

/// Returns the mean seconds of `iters` calls. On a GPU, calls only enqueue work, so timing starts and ends with an
/// empty queue.
fn batch(pg: &ProcessGroup, call: &Collective, iters: u32) -> Result<f64> {
    pg.barrier()?;
    pg.device().synchronize()?;
    let start = Instant::now();
    for _ in 0..iters {
        run(pg, call)?;
    }
    pg.device().synchronize()?;
    Ok(start.elapsed().as_secs_f64() / f64::from(iters))
}

fn run(pg: &ProcessGroup, call: &Collective) -> Result<()> {
    match call {
        Collective::AllReduce { tensor, op } => pg.all_reduce(tensor, *op),
        Collective::Broadcast { tensor, root } => pg.broadcast(tensor, *root),
        Collective::AllGather { output, input } => pg.all_gather(output, input),
        Collective::ReduceScatter { output, input, op } => pg.reduce_scatter(output, input, *op),
        _ => unreachable!("a problem has no other collective"),
    }
}

/// Returns the maximum of each number over the ranks.
fn slowest(pg: &ProcessGroup, numbers: Vec<f64>) -> Result<Vec<f64>> {
    let len = numbers.len();
    let numbers = Tensor::from_vec(numbers, len, pg.device())?;
    pg.all_reduce(&numbers, ReduceOp::Max)?;
    Ok(numbers.to_vec1()?)
}

/// Returns the number of wrong values on all ranks together.
pub(crate) fn errors(pg: &ProcessGroup, problem: &Problem) -> Result<u64> {
    let call = problem.call(pg.rank(), pg.device())?;
    run(pg, &call)?;
    let errors = Tensor::new(&[problem.errors(pg.rank(), &call)? as i64], pg.device())?;
    pg.all_reduce(&errors, ReduceOp::Sum)?;
    Ok(errors.to_vec1::<i64>()?[0] as u64)
}
