//! Distributes the images of a batch among threads.
use super::geometry::Geometry;
use crate::gemm::threads;
use candle_core::Result;
use candle_ddp_tensor::Real;
use rayon::prelude::*;
use std::ops::Range;

/// The images of each thread, and the number of threads that one thread's products may use.
fn parts(geometry: &Geometry) -> (Vec<Range<usize>>, usize) {
    let threads = threads();
    let size = geometry.n.div_ceil(threads).max(1);
    let parts: Vec<_> = (0..geometry.n).step_by(size).map(|start| start..(start + size).min(geometry.n)).collect();
    let each = threads / parts.len().max(1);
    (parts, each)
}

/// Lets each thread `work` on its own images, whose results have `size` elements each.
pub(super) fn each_part<E: Send>(
    geometry: &Geometry,
    size: usize,
    results: &mut [E],
    work: impl Fn(Range<usize>, &mut [E], usize) -> Result<()> + Sync,
) -> Result<()> {
    let (parts, threads) = parts(geometry);
    let Some(first) = parts.first() else { return Ok(()) };
    if size == 0 {
        return Ok(());
    }
    let results = results.par_chunks_mut(first.len() * size);
    parts.clone().into_par_iter().zip(results).try_for_each(|(part, results)| work(part, results, threads))
}

/// The sum of the threads' results for their own images, `size` elements each. It is added up in the order of the
/// images, so it depends only on the number of threads.
pub(super) fn sum_parts<R: Real>(
    geometry: &Geometry,
    size: usize,
    work: impl Fn(Range<usize>, usize) -> Result<Vec<R>> + Sync,
) -> Result<Vec<R>> {
    let (parts, threads) = parts(geometry);
    let sums: Result<Vec<_>> = parts.into_par_iter().map(|part| work(part, threads)).collect();
    let mut sums = sums?.into_iter();
    let mut total = sums.next().unwrap_or_else(|| vec![R::default(); size]);
    for sum in sums {
        total.iter_mut().zip(sum).for_each(|(total, sum)| *total += sum);
    }
    Ok(total)
}
