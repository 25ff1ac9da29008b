//! Winograd's fast algorithm for 3×3 convolutions with stride 1: tiles of outputs from overlapping tiles of inputs, with a
//! quarter (tiles of 4×4 outputs) or 1/2.25 (2×2) of the multiplications (Lavin and Gray, 2015).
//!
//! y = Aᵀ[(G w Gᵀ) ⊙ (Bᵀ x B)]A for each tile, where ⊙ becomes one product of matrices over channels for each of the
//! tile's points. The gradient of the weights is the adjoint, Gᵀ[(A dy Aᵀ) ⊙ (Bᵀ x B)]G. The gradient of x is the
//! convolution of dy with the weights turned by half a turn. Tiles are the columns of the products; a channel's tiles
//! lie side by side, and the transformations work on [`LANES`] of them at a time.
use super::geometry::Geometry;
use super::parts::{each_part, sum_parts};
use super::tile::{Four, Tile, Two};
use crate::gemm::{Strides, gemm};
use candle_core::{Result, WithDType};
use candle_ddp_tensor::{Element, Real, vectorise};
use std::ops::Range;

/// The number of tiles that are transformed at a time.
const LANES: usize = super::tile::LANES;
/// The target minimum of tiles in a block, so that a product is worth its overhead.
const MIN_TILES: usize = 64;
/// The target size of a block's points in bytes.
const BLOCK_BYTES: usize = 4 << 20;
/// The maximum size of the transformed weights in bytes.
const MAX_WEIGHT_BYTES: usize = 48 << 20;
/// The number of channels below which the transformations cost more than the products save.
const MIN_CHANNELS: usize = 24;

/// The tiles to use, if Winograd's algorithm is worth it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Two,
    Four,
}

/// Whether this convolution is worth Winograd's algorithm.
pub(super) fn kind(geometry: &Geometry) -> Option<Kind> {
    let Geometry { n, ci, co, groups, output, kernel, stride, padding, dilation, .. } = *geometry;
    let plain = kernel == [3, 3] && stride == [1, 1] && dilation == [1, 1] && groups == 1;
    let fits = plain && padding.iter().all(|padding| *padding <= 2);
    let weights = |points: usize| points.saturating_mul(ci).saturating_mul(co).saturating_mul(size_of::<f32>());
    if !fits || ci < MIN_CHANNELS || co < MIN_CHANNELS || output.contains(&0) {
        return None;
    }
    let tiles = |size: usize| n * output[0].div_ceil(size) * output[1].div_ceil(size);
    // Outputs beyond the edges are wasted work.
    let wasteful = |size: usize| tiles(size) * size * size > 2 * n * output[0] * output[1];
    let takes =
        |size: usize, points| tiles(size) >= MIN_TILES && !wasteful(size) && weights(points) <= MAX_WEIGHT_BYTES;
    if takes(4, 36) {
        Some(Kind::Four)
    } else if takes(2, 16) {
        Some(Kind::Two)
    } else {
        None
    }
}

/// As [`forward`](super::cpu::forward), for a convolution that [`kind`] takes.
pub(super) fn forward<T: Element>(
    kind: Kind,
    geometry: &Geometry,
    x: &[T],
    weight: &[T::Real],
    bias: Option<&[T::Real]>,
) -> Result<Vec<T>> {
    let turned = false;
    match kind {
        Kind::Two => convolve::<Two, T>(geometry, x, weight, bias, turned),
        Kind::Four => convolve::<Four, T>(geometry, x, weight, bias, turned),
    }
}

/// As [`backward_data`](super::cpu::backward_data), for a convolution that [`kind`] takes.
pub(super) fn backward_data<T: Element>(
    kind: Kind,
    geometry: &Geometry,
    dy: &[T],
    weight: &[T::Real],
    bias: Option<&[T::Real]>,
) -> Result<Vec<T>> {
    let Geometry { ci, co, input, output, padding, .. } = *geometry;
    let back = Geometry { ci: co, co: ci, input: output, output: input, padding: padding.map(|p| 2 - p), ..*geometry };
    match kind {
        Kind::Two => convolve::<Two, T>(&back, dy, weight, bias, true),
        Kind::Four => convolve::<Four, T>(&back, dy, weight, bias, true),
    }
}

/// As [`backward_filter`](super::cpu::backward_filter), for a convolution that [`kind`] takes.
pub(super) fn backward_filter<T: Element>(kind: Kind, geometry: &Geometry, x: &[T], dy: &[T]) -> Result<Vec<T::Real>> {
    match kind {
        Kind::Two => filter::<Two, T>(geometry, x, dy),
        Kind::Four => filter::<Four, T>(geometry, x, dy),
    }
}

fn convolve<A: Tile, T: Element>(
    geometry: &Geometry,
    x: &[T],
    weight: &[T::Real],
    bias: Option<&[T::Real]>,
    turned: bool,
) -> Result<Vec<T>> {
    let Geometry { ci, co, .. } = *geometry;
    let points = transform_weights::<A, T::Real>(geometry, weight, turned);
    let mut y = vec![T::from_f64(0.0); geometry.n * co * geometry.output_pixels()];
    each_part(geometry, co * geometry.output_pixels(), &mut y, |part, y, threads| {
        let images = ci * geometry.input_pixels();
        let x = &x[part.start * images..part.end * images];
        let geometry = Geometry { n: part.len(), ..*geometry };
        let mut work = Work::<T::Real>::new::<A>(&geometry);
        for rows in blocks::<A>(&geometry) {
            let lanes = lanes::<A>(&geometry, &rows);
            transform_inputs::<A, T>(&geometry, rows.clone(), x, &mut work);
            for point in 0..A::POINTS {
                // Turned weights map the outputs of their convolution to its inputs.
                let strides = if turned { Strides::transposed(co) } else { Strides::rows(ci) };
                let weights = (&points[point * ci * co..][..ci * co], strides);
                let inputs = (&work.inputs[point * ci * lanes..][..ci * lanes], Strides::rows(lanes));
                let outputs = &mut work.outputs[point * co * lanes..][..co * lanes];
                gemm((co, lanes, ci), outputs, false, weights, inputs, threads)?;
            }
            transform_outputs::<A, T>(&geometry, rows.clone(), &mut work, bias, y);
        }
        Ok(())
    })?;
    Ok(y)
}

fn filter<A: Tile, T: Element>(geometry: &Geometry, x: &[T], dy: &[T]) -> Result<Vec<T::Real>> {
    let Geometry { ci, co, .. } = *geometry;
    let (inputs, outputs) = (ci * geometry.input_pixels(), co * geometry.output_pixels());
    let zero = T::Real::from_f64(0.0);
    let total = sum_parts(geometry, A::POINTS * ci * co, |part, threads| {
        let (x, dy) = (&x[part.start * inputs..part.end * inputs], &dy[part.start * outputs..part.end * outputs]);
        let geometry = Geometry { n: part.len(), ..*geometry };
        let mut work = Work::<T::Real>::new::<A>(&geometry);
        let mut sum = vec![zero; A::POINTS * ci * co];
        for rows in blocks::<A>(&geometry) {
            let lanes = lanes::<A>(&geometry, &rows);
            transform_inputs::<A, T>(&geometry, rows.clone(), x, &mut work);
            transform_gradients::<A, T>(&geometry, rows.clone(), dy, &mut work);
            for (point, sum) in sum.chunks_exact_mut(ci * co).enumerate() {
                let inputs = (&work.inputs[point * ci * lanes..][..ci * lanes], Strides::transposed(lanes));
                let outputs = (&work.outputs[point * co * lanes..][..co * lanes], Strides::rows(lanes));
                gemm((co, ci, lanes), sum, true, outputs, inputs, threads)?;
            }
        }
        Ok(sum)
    })?;
    Ok(transform_back::<A, T::Real>(geometry, &total))
}

/// A thread's working memory: the points of a block's tiles, by point, channel and tile, and the elements of a
/// channel's tiles.
struct Work<R> {
    inputs: Vec<R>,
    outputs: Vec<R>,
    elements: Vec<R>,
    line: Vec<R>,
}

impl<R: Real> Work<R> {
    fn new<A: Tile>(geometry: &Geometry) -> Self {
        let rows = blocks::<A>(geometry).next().unwrap_or(0..0);
        let lanes = lanes::<A>(geometry, &rows);
        let zeros = |count| vec![R::default(); count];
        Self {
            inputs: zeros(A::POINTS * geometry.ci * lanes),
            outputs: zeros(A::POINTS * geometry.co * lanes),
            elements: zeros(A::POINTS * lanes),
            line: zeros(across::<A>(geometry) * A::OUTPUTS + 2),
        }
    }
}

/// The number of tiles side by side in an image.
fn across<A: Tile>(geometry: &Geometry) -> usize {
    geometry.output[1].div_ceil(A::OUTPUTS)
}

/// The number of rows of tiles in an image.
fn down<A: Tile>(geometry: &Geometry) -> usize {
    geometry.output[0].div_ceil(A::OUTPUTS)
}

/// All rows of tiles, numbered through all images, block by block.
fn blocks<A: Tile>(geometry: &Geometry) -> impl Iterator<Item = Range<usize>> {
    let bytes = A::POINTS * (geometry.ci + geometry.co) * size_of::<f32>();
    let tiles = (BLOCK_BYTES / bytes).max(MIN_TILES);
    let rows = geometry.n * down::<A>(geometry);
    let step = (tiles / across::<A>(geometry)).clamp(1, rows.max(1));
    (0..rows).step_by(step).map(move |start| start..(start + step).min(rows))
}

/// The number of tiles in a block of `rows`, including padding to whole vectors.
fn lanes<A: Tile>(geometry: &Geometry, rows: &Range<usize>) -> usize {
    (rows.len() * across::<A>(geometry)).next_multiple_of(LANES)
}

/// G w Gᵀ for the weights of each pair of channels, by point, output and input, where `weight` is (co, ci, 3, 3); if
/// `turned`, the weights are (ci, co, 3, 3), and turned by half a turn.
fn transform_weights<A: Tile, R: Real>(geometry: &Geometry, weight: &[R], turned: bool) -> Vec<R> {
    let pairs = geometry.ci * geometry.co;
    let mut points = vec![R::default(); A::POINTS * pairs];
    let mut block = vec![R::default(); A::POINTS * LANES];
    vectorise!(|| {
        for (start, weights) in (0..pairs).step_by(LANES).zip(weight.chunks(9 * LANES)) {
            let count = weights.len() / 9;
            let mut taps = [[R::default(); LANES]; 9];
            for (lane, weights) in weights.chunks_exact(9).enumerate() {
                for (tap, value) in weights.iter().enumerate() {
                    taps[if turned { 8 - tap } else { tap }][lane] = *value;
                }
            }
            A::weights(&taps, &mut block);
            for (point, values) in block.chunks_exact(LANES).enumerate() {
                points[point * pairs + start..][..count].copy_from_slice(&values[..count]);
            }
        }
    });
    points
}

/// Gᵀ w G, the way back of [`transform_weights`] for gradients.
fn transform_back<A: Tile, R: Real>(geometry: &Geometry, points: &[R]) -> Vec<R> {
    let pairs = geometry.ci * geometry.co;
    let mut weight = vec![R::default(); 9 * pairs];
    let mut block = vec![R::default(); A::POINTS * LANES];
    vectorise!(|| {
        for (start, weights) in (0..pairs).step_by(LANES).zip(weight.chunks_mut(9 * LANES)) {
            let count = weights.len() / 9;
            for (point, values) in block.chunks_exact_mut(LANES).enumerate() {
                values[..count].copy_from_slice(&points[point * pairs + start..][..count]);
            }
            let taps = A::weight_gradients(&block);
            for (lane, weights) in weights.chunks_exact_mut(9).enumerate() {
                for (tap, value) in weights.iter_mut().enumerate() {
                    *value = taps[tap][lane];
                }
            }
        }
    });
    weight
}

fn widen<T: Element>(from: &[T], to: &mut [T::Real]) {
    vectorise!(|| to.iter_mut().zip(from).for_each(|(to, from)| *to = from.widen()));
}

/// Bᵀ x B for the tiles of all channels.
///
/// Only the arithmetic uses wide vectors: their instructions for elements that lie apart are slower than single loads.
fn transform_inputs<A: Tile, T: Element>(geometry: &Geometry, rows: Range<usize>, x: &[T], work: &mut Work<T::Real>) {
    let lanes = lanes::<A>(geometry, &rows);
    let ([height, width], [pad_y, pad_x], zero) = (geometry.input, geometry.padding, T::Real::default());
    let (size, across, down) = (A::OUTPUTS + 2, across::<A>(geometry), down::<A>(geometry));
    let Work { inputs, elements, line, .. } = work;
    for channel in 0..geometry.ci {
        for (start, row) in (0..).step_by(across).zip(rows.clone()) {
            let (image, row) = (row / down, row % down);
            let plane = (image * geometry.ci + channel) * height * width;
            for in_tile in 0..size {
                // Elements lie by their place in the tile, then by tile.
                let places = elements.chunks_exact_mut(lanes).skip(in_tile * size).take(size);
                let Some(at) = (row * A::OUTPUTS + in_tile).checked_sub(pad_y).filter(|at| *at < height) else {
                    places.for_each(|place| place[start..start + across].fill(zero));
                    continue;
                };
                let source = &x[plane + at * width..][..width];
                let end = (pad_x + width).min(line.len());
                line[..pad_x].fill(zero);
                widen(source, &mut line[pad_x..end]);
                line[end..].fill(zero);
                for (shift, place) in places.enumerate() {
                    let steps = line[shift..].iter().step_by(A::OUTPUTS);
                    place[start..start + across].iter_mut().zip(steps).for_each(|(to, from)| *to = *from);
                }
            }
        }
        vectorise!(|| {
            for lane in (0..lanes).step_by(LANES) {
                A::inputs(elements, lanes, lane, &mut inputs[channel * lanes..], geometry.ci * lanes);
            }
        });
    }
}

/// Aᵀ m A for the tiles of all channels, to their places in y.
fn transform_outputs<A: Tile, T: Element>(
    geometry: &Geometry,
    rows: Range<usize>,
    work: &mut Work<T::Real>,
    bias: Option<&[T::Real]>,
    y: &mut [T],
) {
    let lanes = lanes::<A>(geometry, &rows);
    let [height, width] = geometry.output;
    let (size, across, down) = (A::OUTPUTS, across::<A>(geometry), down::<A>(geometry));
    let Work { outputs, elements, .. } = work;
    for channel in 0..geometry.co {
        let bias = bias.map_or(T::Real::default(), |bias| bias[channel]);
        vectorise!(|| {
            for lane in (0..lanes).step_by(LANES) {
                A::outputs(&outputs[channel * lanes..], geometry.co * lanes, lane, elements, lanes);
            }
        });
        for (start, row) in (0..).step_by(across).zip(rows.clone()) {
            let (image, row) = (row / down, row % down);
            let plane = (image * geometry.co + channel) * height * width;
            for in_tile in 0..size.min(height - row * size) {
                let target = &mut y[plane + (row * size + in_tile) * width..][..width];
                for (shift, place) in elements.chunks_exact(lanes).skip(in_tile * size).take(size).enumerate() {
                    let steps = target.iter_mut().skip(shift).step_by(size);
                    steps.zip(&place[start..]).for_each(|(to, from)| *to = T::narrow(*from + bias));
                }
            }
        }
    }
}

/// A dy Aᵀ for the tiles of all channels.
fn transform_gradients<A: Tile, T: Element>(
    geometry: &Geometry,
    rows: Range<usize>,
    dy: &[T],
    work: &mut Work<T::Real>,
) {
    let lanes = lanes::<A>(geometry, &rows);
    let [height, width] = geometry.output;
    let (size, across, down, zero) = (A::OUTPUTS, across::<A>(geometry), down::<A>(geometry), T::Real::default());
    let Work { outputs, elements, line, .. } = work;
    for channel in 0..geometry.co {
        for (start, row) in (0..).step_by(across).zip(rows.clone()) {
            let (image, row) = (row / down, row % down);
            let plane = (image * geometry.co + channel) * height * width;
            for in_tile in 0..size {
                let places = elements.chunks_exact_mut(lanes).skip(in_tile * size).take(size);
                let at = row * size + in_tile;
                if at >= height {
                    places.for_each(|place| place[start..start + across].fill(zero));
                    continue;
                }
                let source = &dy[plane + at * width..][..width];
                widen(source, &mut line[..width]);
                line[width..].fill(zero);
                for (shift, place) in places.enumerate() {
                    let steps = line[shift..].iter().step_by(size);
                    place[start..start + across].iter_mut().zip(steps).for_each(|(to, from)| *to = *from);
                }
            }
        }
        // Padding tiles contribute zeros.
        let tiles = rows.len() * across;
        elements.chunks_exact_mut(lanes).for_each(|place| place[tiles..].fill(zero));
        vectorise!(|| {
            for lane in (0..lanes).step_by(LANES) {
                A::gradients(elements, lanes, lane, &mut outputs[channel * lanes..], geometry.co * lanes);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conv::products;
    use candle_core::{DType, Device};
    use candle_ddp_tensor::seed::Generator;

    fn numbers(count: usize, seed: u64) -> Vec<f64> {
        let numbers = Generator::new(seed).randn(0.0, 1.0, count, DType::F64, &Device::Cpu).unwrap();
        numbers.to_vec1().unwrap()
    }

    /// The largest error, relative to the largest element.
    fn error<R: Real>(values: &[R], exact: &[f64]) -> f64 {
        assert_eq!(values.len(), exact.len());
        let largest = exact.iter().fold(0.0, |largest, value| value.abs().max(largest));
        values.iter().zip(exact).map(|(a, b)| (a.to_f64() - b).abs()).fold(0.0, f64::max) / largest
    }

    #[test]
    fn tiles_give_what_columns_give() {
        let shapes =
            [([9, 7], [1, 1]), ([4, 5], [0, 0]), ([8, 8], [2, 1]), ([1, 2], [1, 0])].map(|shape| (shape, 6, 5));
        // Rounding grows with the number of channels.
        for ((output, padding), ci, co) in shapes.into_iter().chain([(([8, 8], [1, 1]), 256, 40)]) {
            let input = [0, 1].map(|axis| output[axis] + 2 - 2 * padding[axis]);
            if input.contains(&0) {
                continue;
            }
            let geometry = Geometry {
                n: 5,
                ci,
                co,
                groups: 1,
                input,
                output,
                kernel: [3, 3],
                stride: [1, 1],
                padding,
                dilation: [1, 1],
            };
            let x = numbers(geometry.n * geometry.ci * geometry.input_pixels(), 1);
            let weight = numbers(9 * geometry.ci * geometry.co, 2);
            let dy = numbers(geometry.n * geometry.co * geometry.output_pixels(), 3);
            let bias = numbers(geometry.co, 4);
            let y = products::forward(&geometry, &x, &weight, Some(&bias)).unwrap();
            let dx = products::backward_data(&geometry, &dy, &weight).unwrap();
            let d_weight = products::backward_filter(&geometry, &x, &dy).unwrap();
            let single = |values: &[f64]| values.iter().map(|value| *value as f32).collect::<Vec<_>>();
            for (kind, tolerance) in [(Kind::Two, 2e-6), (Kind::Four, 1e-5)] {
                let exactly = [
                    error(&forward(kind, &geometry, &x, &weight, Some(&bias)).unwrap(), &y),
                    error(&backward_data(kind, &geometry, &dy, &weight, None).unwrap(), &dx),
                    error(&backward_filter(kind, &geometry, &x, &dy).unwrap(), &d_weight),
                ];
                assert!(exactly.iter().all(|error| *error < 1e-12), "{geometry:?}, {kind:?}: {exactly:?}");
                let (x, weight, dy, bias) = (single(&x), single(&weight), single(&dy), single(&bias));
                let singly = [
                    error(&forward(kind, &geometry, &x, &weight, Some(&bias)).unwrap(), &y),
                    error(&backward_data(kind, &geometry, &dy, &weight, None).unwrap(), &dx),
                    error(&backward_filter(kind, &geometry, &x, &dy).unwrap(), &d_weight),
                ];
                assert!(singly.iter().all(|error| *error < tolerance), "{geometry:?}, {kind:?}: {singly:?}");
            }
        }
    }
}
