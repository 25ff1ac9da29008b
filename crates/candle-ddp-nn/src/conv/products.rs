//! Convolutions on the CPU as products of the weight matrix with columns (see `columns.rs`), a block of columns at a
//! time, in the type of arithmetic. The images of a pointwise convolution are multiplied where they lie, if they are large enough.
use super::columns::{by_image, col2im, im2col};
use super::depthwise;
use super::geometry::Geometry;
use super::parts::{each_part, sum_parts};
use crate::gemm::{Strides, gemm, same_mut, wide};
use candle_core::{Result, WithDType};
use candle_ddp_tensor::{Element, vectorise};
use std::ops::Range;

/// The target size of a block's columns in bytes, so that they stay in a core's cache.
const BLOCK_BYTES: usize = 2 << 20;
/// The target minimum of columns in a block, so that a product is worth its overhead.
const MIN_COLUMNS: usize = 512;
/// The minimum of pixels in an image that is multiplied where it lies: smaller ones are better collected in blocks.
const MIN_PIXELS: usize = 256;

/// As [`forward`](super::cpu::forward).
pub(super) fn forward<T: Element>(
    geometry: &Geometry,
    x: &[T],
    weight: &[T],
    bias: Option<&[T::Real]>,
) -> Result<Vec<T>> {
    let weight = &wide(weight)[..];
    let zero = T::from_f64(0.0);
    let mut y = vec![zero; geometry.n * geometry.co * geometry.output_pixels()];
    let images = geometry.ci * geometry.input_pixels();
    each_part(geometry, geometry.co * geometry.output_pixels(), &mut y, |part, y, threads| {
        let x = &x[part.start * images..part.end * images];
        let geometry = Geometry { n: part.len(), ..*geometry };
        if geometry.is_depthwise() {
            vectorise!(|| depthwise::forward(&geometry, x, weight, bias, y));
            return Ok(());
        }
        if let (Some(x), Some(y)) = (in_place(&geometry, x), same_mut::<T, T::Real>(y)) {
            let (pixels, weight) = (geometry.output_pixels(), (weight, Strides::rows(geometry.ci)));
            for (x, y) in x.chunks_exact(images).zip(y.chunks_exact_mut(geometry.co * pixels)) {
                if let Some(bias) = bias {
                    y.chunks_exact_mut(pixels).zip(bias).for_each(|(plane, bias)| plane.fill(*bias));
                }
                let (extents, x) = ((geometry.co, pixels, geometry.ci), (x, Strides::rows(pixels)));
                gemm(extents, y, bias.is_some(), weight, x, threads)?;
            }
            return Ok(());
        }
        let mut work = Work::<T::Real>::new(&geometry);
        for rows in blocks(&geometry) {
            let count = rows.len() * geometry.output[1];
            for group in 0..geometry.groups {
                let columns = &mut work.columns[..geometry.taps() * count];
                vectorise!(|| im2col(&geometry, group, rows.clone(), x, columns));
                let weight = group_weight(&geometry, group, weight);
                let extents = (geometry.group_outputs(), count, geometry.taps());
                let outputs = &mut work.outputs[..geometry.group_outputs() * count];
                let (weight, columns) = ((weight, Strides::rows(geometry.taps())), (&*columns, Strides::rows(count)));
                gemm(extents, outputs, false, weight, columns, threads)?;
                vectorise!(|| scatter(&geometry, group, rows.clone(), outputs, bias, y));
            }
        }
        Ok(())
    })?;
    Ok(y)
}

/// As [`backward_data`](super::cpu::backward_data), without a bias.
pub(super) fn backward_data<T: Element>(geometry: &Geometry, dy: &[T], weight: &[T]) -> Result<Vec<T::Real>> {
    let weight = &wide(weight)[..];
    let mut dx = vec![T::Real::from_f64(0.0); geometry.n * geometry.ci * geometry.input_pixels()];
    let images = geometry.co * geometry.output_pixels();
    each_part(geometry, geometry.ci * geometry.input_pixels(), &mut dx, |part, dx, threads| {
        let dy = &dy[part.start * images..part.end * images];
        let geometry = Geometry { n: part.len(), ..*geometry };
        if geometry.is_depthwise() {
            vectorise!(|| depthwise::backward_data(&geometry, dy, weight, dx));
            return Ok(());
        }
        if let Some(dy) = in_place(&geometry, dy) {
            let (pixels, weight) = (geometry.output_pixels(), (weight, Strides::transposed(geometry.ci)));
            for (dx, dy) in dx.chunks_exact_mut(geometry.ci * pixels).zip(dy.chunks_exact(images)) {
                gemm((geometry.ci, pixels, geometry.co), dx, false, weight, (dy, Strides::rows(pixels)), threads)?;
            }
            return Ok(());
        }
        let mut work = Work::<T::Real>::new(&geometry);
        for rows in blocks(&geometry) {
            let count = rows.len() * geometry.output[1];
            for group in 0..geometry.groups {
                let outputs = &mut work.outputs[..geometry.group_outputs() * count];
                vectorise!(|| collect(&geometry, group, rows.clone(), dy, outputs));
                let weight = group_weight(&geometry, group, weight);
                let extents = (geometry.taps(), count, geometry.group_outputs());
                let columns = &mut work.columns[..geometry.taps() * count];
                let (weight, outputs) =
                    ((weight, Strides::transposed(geometry.taps())), (&*outputs, Strides::rows(count)));
                gemm(extents, columns, false, weight, outputs, threads)?;
                vectorise!(|| col2im(&geometry, group, rows.clone(), columns, dx));
            }
        }
        Ok(())
    })?;
    Ok(dx)
}

/// As [`backward_filter`](super::cpu::backward_filter).
pub(super) fn backward_filter<T: Element>(geometry: &Geometry, x: &[T], dy: &[T]) -> Result<Vec<T::Real>> {
    let zero = T::Real::from_f64(0.0);
    let size = geometry.co * geometry.taps();
    let (inputs, outputs) = (geometry.ci * geometry.input_pixels(), geometry.co * geometry.output_pixels());
    sum_parts(geometry, size, |part, threads| {
        let (x, dy) = (&x[part.start * inputs..part.end * inputs], &dy[part.start * outputs..part.end * outputs]);
        let geometry = Geometry { n: part.len(), ..*geometry };
        let mut sum = vec![zero; size];
        if geometry.is_depthwise() {
            vectorise!(|| depthwise::backward_filter(&geometry, x, dy, &mut sum));
            return Ok(sum);
        }
        if let (Some(x), Some(dy)) = (in_place(&geometry, x), in_place(&geometry, dy)) {
            let pixels = geometry.output_pixels();
            for (x, dy) in x.chunks_exact(inputs).zip(dy.chunks_exact(outputs)) {
                let (dy, x) = ((dy, Strides::rows(pixels)), (x, Strides::transposed(pixels)));
                gemm((geometry.co, geometry.ci, pixels), &mut sum, true, dy, x, threads)?;
            }
            return Ok(sum);
        }
        let mut work = Work::<T::Real>::new(&geometry);
        for rows in blocks(&geometry) {
            let count = rows.len() * geometry.output[1];
            for (group, sum) in sum.chunks_exact_mut(geometry.group_outputs() * geometry.taps()).enumerate() {
                let columns = &mut work.columns[..geometry.taps() * count];
                let outputs = &mut work.outputs[..geometry.group_outputs() * count];
                vectorise!(|| {
                    im2col(&geometry, group, rows.clone(), x, columns);
                    collect(&geometry, group, rows.clone(), dy, outputs);
                });
                let extents = (geometry.group_outputs(), geometry.taps(), count);
                let (outputs, columns) = ((&*outputs, Strides::rows(count)), (&*columns, Strides::transposed(count)));
                gemm(extents, sum, true, outputs, columns, threads)?;
            }
        }
        Ok(sum)
    })
}

/// The elements of images that are multiplied where they lie.
fn in_place<'a, T: Element>(geometry: &Geometry, images: &'a [T]) -> Option<&'a [T::Real]> {
    let takes = geometry.is_pointwise() && geometry.output_pixels() >= MIN_PIXELS;
    takes.then(|| T::as_reals(images)).flatten()
}

/// A thread's working memory.
struct Work<R> {
    columns: Vec<R>,
    outputs: Vec<R>,
}

impl<R: WithDType> Work<R> {
    fn new(geometry: &Geometry) -> Self {
        let count = block_rows(geometry) * geometry.output[1];
        let zeros = |rows: usize| vec![R::from_f64(0.0); rows * count];
        Self { columns: zeros(geometry.taps()), outputs: zeros(geometry.group_outputs()) }
    }
}

/// The number of output rows in a block.
fn block_rows(geometry: &Geometry) -> usize {
    let columns = (BLOCK_BYTES / size_of::<f32>() / geometry.taps().max(1)).max(MIN_COLUMNS);
    (columns / geometry.output[1].max(1)).clamp(1, geometry.n * geometry.output[0])
}

/// All rows of outputs, numbered through all images, block by block.
fn blocks(geometry: &Geometry) -> impl Iterator<Item = Range<usize>> {
    let (rows, step) = (geometry.n * geometry.output[0], block_rows(geometry));
    (0..rows).step_by(step).map(move |start| start..(start + step).min(rows))
}

fn group_weight<'a, R>(geometry: &Geometry, group: usize, weight: &'a [R]) -> &'a [R] {
    let size = geometry.group_outputs() * geometry.taps();
    &weight[group * size..(group + 1) * size]
}

/// The runs of neighbouring outputs of a channel in `rows`: where each starts in the images and in the block.
#[inline(always)]
fn runs(geometry: &Geometry, channel: usize, rows: Range<usize>) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
    let ([height, width], channels) = (geometry.output, geometry.co);
    by_image(height, rows).map(move |(image, rows, start)| {
        let (there, here) = (((image * channels + channel) * height + rows.start) * width, start * width);
        let size = rows.len() * width;
        (there..there + size, here..here + size)
    })
}

/// Writes a block's outputs of `group` to their places in the images.
#[inline(always)]
fn scatter<T: Element>(
    geometry: &Geometry,
    group: usize,
    rows: Range<usize>,
    outputs: &[T::Real],
    bias: Option<&[T::Real]>,
    y: &mut [T],
) {
    let count = rows.len() * geometry.output[1];
    for (index, outputs) in outputs.chunks_exact(count).enumerate() {
        let channel = group * geometry.group_outputs() + index;
        for (there, here) in runs(geometry, channel, rows.clone()) {
            let pairs = y[there].iter_mut().zip(&outputs[here]);
            match bias {
                Some(bias) => pairs.for_each(|(to, from)| *to = T::narrow(*from + bias[channel])),
                None => pairs.for_each(|(to, from)| *to = T::narrow(*from)),
            }
        }
    }
}

/// Collects a block's outputs of `group` from the images.
#[inline(always)]
fn collect<T: Element>(geometry: &Geometry, group: usize, rows: Range<usize>, y: &[T], outputs: &mut [T::Real]) {
    let count = rows.len() * geometry.output[1];
    for (index, outputs) in outputs.chunks_exact_mut(count).enumerate() {
        for (there, here) in runs(geometry, group * geometry.group_outputs() + index, rows.clone()) {
            outputs[here].iter_mut().zip(&y[there]).for_each(|(to, from)| *to = from.widen());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Images above and below the limit from which they are multiplied where they lie.
    #[test]
    fn pointwise_convolutions_are_sums_over_channels() {
        let (n, ci, co) = (3, 5, 4);
        for size in [[15, 17], [16, 17]] {
            let geometry = Geometry {
                n,
                ci,
                co,
                groups: 1,
                input: size,
                output: size,
                kernel: [1, 1],
                stride: [1, 1],
                padding: [0, 0],
                dilation: [1, 1],
            };
            let pixels = size[0] * size[1];
            let numbers = |count: usize, step: f64| (0..count).map(|i| (i as f64 * step).sin()).collect::<Vec<_>>();
            let (x, dy) = (numbers(n * ci * pixels, 0.7), numbers(n * co * pixels, 0.3));
            let (weight, bias) = (numbers(co * ci, 1.1), numbers(co, 1.9));
            let [mut y, mut dx, mut dw] = [n * co * pixels, n * ci * pixels, co * ci].map(|count| vec![0.; count]);
            for (image, output, pixel) in
                (0..n).flat_map(|image| (0..co).flat_map(move |o| (0..pixels).map(move |pixel| (image, o, pixel))))
            {
                let to = (image * co + output) * pixels + pixel;
                y[to] = bias[output];
                for input in 0..ci {
                    let from = (image * ci + input) * pixels + pixel;
                    y[to] += weight[output * ci + input] * x[from];
                    dx[from] += weight[output * ci + input] * dy[to];
                    dw[output * ci + input] += x[from] * dy[to];
                }
            }
            let same = |ours: Vec<f64>, expected: &[f64]| {
                let difference = ours.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0., f64::max);
                assert!(ours.len() == expected.len() && difference < 1e-12, "{size:?}: {difference}");
            };
            same(forward(&geometry, &x, &weight, Some(&bias)).unwrap(), &y);
            same(backward_data(&geometry, &dy, &weight).unwrap(), &dx);
            same(backward_filter(&geometry, &x, &dy).unwrap(), &dw);
            // Without a bias, and in 16 bits, which are collected in blocks.
            let narrow = |values: &[f64]| values.iter().map(|value| half::f16::from_f64(*value)).collect::<Vec<_>>();
            let plain = forward(&geometry, &x, &weight, None).unwrap();
            let halves = forward(&geometry, &narrow(&x), &narrow(&weight), None).unwrap();
            let difference = halves.iter().zip(&plain).map(|(a, b)| (a.to_f64() - b).abs()).fold(0., f64::max);
            assert!(difference < 1e-2, "{size:?}: {difference}");
            let sums = y.chunks(pixels).zip(bias.iter().cycle()).flat_map(|(y, bias)| y.iter().map(move |y| y - bias));
            same(plain, &sums.collect::<Vec<_>>());
        }
    }
}
