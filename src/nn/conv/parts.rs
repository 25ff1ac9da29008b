//! How the images of a batch are shared among threads.
use super::geometry::Geometry;
use crate::nn::gemm::threads;
use candle_core::Result;
use rayon::prelude::*;
use std::ops::Range;

/// The images of each thread, and how many threads the products of one of these may use.
pub(super) fn parts(geometry: &Geometry) -> (Vec<Range<usize>>, usize) {
    let threads = threads();
    let size = geometry.n.div_ceil(threads).max(1);
    let parts: Vec<_> = (0..geometry.n).step_by(size).map(|start| start..(start + size).min(geometry.n)).collect();
    let each = threads / parts.len().max(1);
    (parts, each)
}

/// Lets threads `work` on images of their own, whose results have `size` elements each.
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
