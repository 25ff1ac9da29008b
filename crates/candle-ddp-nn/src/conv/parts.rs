//! Distributes the images of a batch among threads. Which images are convolved together decides in which order sums are added
//! up; so it depends on the convolution, and not on the number of threads.
use super::geometry::Geometry;
use crate::gemm::threads;
use candle_core::Result;
use candle_ddp_tensor::Real;
use candle_ddp_tensor::parallel::Each;
use rayon::prelude::*;
use std::ops::Range;

/// The target minimum of output pixels in a part, so that it has blocks of a good size.
const PIXELS: usize = 2048;
/// The largest number of parts.
const PARTS: usize = 16;
/// The target minimum of output pixels in a part whose result is as large as the weights, and is added to the others'.
const SUMMED_PIXELS: usize = 8192;
/// The largest number of such parts.
const SUMMED_PARTS: usize = 4;

/// The images of `count` parts, and the number of threads that one part's products may use.
fn parts(geometry: &Geometry, count: usize) -> (Vec<Range<usize>>, usize) {
    let size = geometry.n.div_ceil(count).max(1);
    let parts: Vec<_> = (0..geometry.n).step_by(size).map(|start| start..(start + size).min(geometry.n)).collect();
    let each = threads() / parts.len().max(1);
    (parts, each.max(1))
}

/// Lets threads `work` on their own images, whose results have `size` elements each.
pub(super) fn each_part<E: Send>(
    geometry: &Geometry,
    size: usize,
    results: &mut [E],
    work: impl Fn(Range<usize>, &mut [E], usize) -> Result<()> + Sync,
) -> Result<()> {
    // Without products, each pixel is computed by itself.
    let count = match geometry.is_depthwise() {
        true => threads(),
        false => (geometry.n * geometry.output_pixels() / PIXELS).clamp(1, PARTS),
    };
    let (parts, threads) = parts(geometry, count);
    let Some(first) = parts.first() else { return Ok(()) };
    if size == 0 {
        return Ok(());
    }
    let results = results.par_chunks_mut(first.len() * size);
    parts.clone().into_par_iter().zip(results).try_each_with(|| (), |(), (part, results)| work(part, results, threads))
}

/// The sum of the results for the images of each part, `size` elements each, added up in the order of the images.
pub(super) fn sum_parts<R: Real>(
    geometry: &Geometry,
    size: usize,
    work: impl Fn(Range<usize>, usize) -> Result<Vec<R>> + Sync,
) -> Result<Vec<R>> {
    let count = (geometry.n * geometry.output_pixels() / SUMMED_PIXELS).clamp(1, SUMMED_PARTS);
    let (parts, threads) = parts(geometry, count);
    let mut sums = vec![Vec::new(); parts.len()];
    let each = parts.into_par_iter().zip(&mut sums);
    each.try_each_with(|| (), |(), (part, sum)| work(part, threads).map(|made| *sum = made))?;
    let mut sums = sums.into_iter();
    let mut total = sums.next().unwrap_or_else(|| vec![R::default(); size]);
    for sum in sums {
        total.iter_mut().zip(sum).for_each(|(total, sum)| *total += sum);
    }
    Ok(total)
}
