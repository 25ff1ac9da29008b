//! The gradient of the weights: a product whose depth goes over pairs of outputs.
//!
//! A pair is one output of two images, or of the two halves of one image. So the inputs that a tap sees at neighbouring pairs
//! lie side by side, and each tap reads the same cells.
use super::planes::{Band, Planes, Run, Window};
use super::{COLUMNS, taps, window};
use crate::conv::geometry::Geometry;
use crate::conv::parts::sum_parts;
use crate::gemm::bf16::{LANES, PackedRows, Unit, WIDTH, multiply_packed};
use candle_core::Result;
use candle_ddp_tensor::parallel::Each;
use candle_ddp_tensor::vectorise;
use half::bf16;
use rayon::prelude::*;
use std::ops::Range;

/// The target depth of a block in pairs. Tests have small images.
const DEPTH: usize = if cfg!(test) { 24 } else { 512 };

/// As [`backward_filter`](crate::conv::cpu::backward_filter), by `unit`.
pub(in crate::conv) fn backward_filter<U: Unit>(
    unit: U,
    geometry: &Geometry,
    x: &[bf16],
    dy: &[bf16],
) -> Result<Vec<f32>> {
    let (inputs, outputs) = (geometry.ci * geometry.input_pixels(), geometry.co * geometry.output_pixels());
    let size = geometry.co * geometry.taps();
    let mut gradient = sum_parts(geometry, size, |part, threads| {
        let (x, dy) = (&x[part.start * inputs..part.end * inputs], &dy[part.start * outputs..part.end * outputs]);
        let images = part.len();
        let folded = if images == 1 { folded(geometry, x, dy) } else { None };
        let part = match &folded {
            Some((geometry, x, dy)) => Part { geometry, window: window(geometry), x, dy, threads },
            None => Part { geometry, window: window(geometry), x, dy, threads },
        };
        let mut sum = vec![0.0; size];
        for halves in part.window.halves(images) {
            for (group, sum) in sum.chunks_exact_mut(geometry.group_outputs() * geometry.taps()).enumerate() {
                part.add(unit, &halves, group, sum);
            }
        }
        Ok(sum)
    })?;
    order_by_channel(geometry, &mut gradient);
    Ok(gradient)
}

/// Two equal parts of a batch, whose outputs are paired: a band, and how many images and rows after it the other one lies.
/// A single row of a single image has no other.
struct Halves {
    first: Band,
    second: Option<[usize; 2]>,
}

impl Window {
    /// Halves of about [`DEPTH`] outputs each, or of a row, which cover the batch.
    fn halves(&self, images: usize) -> Vec<Halves> {
        let [height, width] = self.outputs;
        let rows = (DEPTH / width.max(1)).clamp(1, height.max(1));
        let mut all = Vec::new();
        for images in evenly(images, 2 * (DEPTH / (height * width).max(1)).max(1)) {
            if images.len() == 1 {
                all.extend(evenly(height, 2 * rows).map(|rows| {
                    let half = rows.len().div_ceil(2);
                    let first = Band { images: images.clone(), rows: rows.start..rows.start + half };
                    Halves { first, second: (rows.len() > 1).then_some([0, half]) }
                }));
                continue;
            }
            let pairs = images.len() / 2;
            all.extend((0..height).step_by(rows).map(|row| {
                let first = Band { images: images.start..images.start + pairs, rows: row..(row + rows).min(height) };
                Halves { first, second: Some([pairs, 0]) }
            }));
        }
        all
    }
}

/// Parts of 0..`count` with an even number of elements up to `limit`, and one with the last element of an odd count.
fn evenly(count: usize, limit: usize) -> impl Iterator<Item = Range<usize>> {
    let mut start = 0;
    std::iter::from_fn(move || {
        let part = start..start + (limit.min(count - start) / 2 * 2).max(1).min(count - start);
        start = part.end;
        (!part.is_empty()).then_some(part)
    })
}

/// A line as two rows, so that it has halves: the same convolution with its input and its gradient. After an odd number of
/// outputs, one follows whose gradient is zero.
fn folded(geometry: &Geometry, x: &[bf16], dy: &[bf16]) -> Option<(Geometry, Vec<bf16>, Vec<bf16>)> {
    let Geometry { input, output, kernel, stride, padding, dilation, .. } = *geometry;
    if [input[0], kernel[0], output[0]] != [1; 3] || padding[0] > 0 || output[1] < 2 {
        return None;
    }
    let half = output[1].div_ceil(2);
    let seen = (half - 1) * stride[1] + (kernel[1] - 1) * dilation[1] + 1;
    let rows = |lines: &[bf16], width: usize, shift: usize, distance: usize, row: usize| {
        let mut rows = vec![bf16::ZERO; lines.len() / width.max(1) * 2 * row];
        for (line, rows) in lines.chunks_exact(width.max(1)).zip(rows.chunks_exact_mut(2 * row)) {
            for (at, row) in rows.chunks_exact_mut(row).enumerate() {
                // Where the row starts in the line, or how many zeros come first.
                let (from, zeros) = ((at * distance).saturating_sub(shift), shift.saturating_sub(at * distance));
                let (Some(from), Some(to)) = (line.get(from..), row.get_mut(zeros..)) else { continue };
                to.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
            }
        }
        rows
    };
    let x = rows(x, input[1], padding[1], half * stride[1], seen);
    let dy = rows(dy, output[1], 0, half, half);
    let folded = Geometry { input: [2, seen], output: [2, half], stride: [1, stride[1]], padding: [0; 2], ..*geometry };
    Some((folded, x, dy))
}

/// The channels of a group that are packed together.
fn channels(geometry: &Geometry) -> impl Iterator<Item = Range<usize>> {
    let inputs = geometry.group_inputs();
    (0..inputs).step_by(WIDTH).map(move |start| start..(start + WIDTH).min(inputs))
}

/// Sums have an input channel's taps far apart, and the taps of [`channels`] side by side: this puts each channel's together.
fn order_by_channel(geometry: &Geometry, sums: &mut [f32]) {
    let taps = geometry.kernel[0] * geometry.kernel[1];
    if taps <= 1 || geometry.group_inputs() <= 1 {
        return;
    }
    sums.par_chunks_mut(geometry.taps()).each(|sums| {
        let mut copy = vec![0.0; WIDTH * taps];
        for channels in channels(geometry) {
            let sums = &mut sums[channels.start * taps..channels.end * taps];
            let copy = &mut copy[..sums.len()];
            copy.copy_from_slice(sums);
            for (channel, sums) in sums.chunks_exact_mut(taps).enumerate() {
                sums.iter_mut()
                    .zip(copy[channel..].iter().step_by(channels.len()))
                    .for_each(|(sum, copy)| *sum = *copy);
            }
        }
    });
}

/// The images that are summed together.
struct Part<'a> {
    geometry: &'a Geometry,
    window: Window,
    x: &'a [bf16],
    dy: &'a [bf16],
    threads: usize,
}

impl Part<'_> {
    /// Adds to a group's sums what two halves contribute.
    fn add<U: Unit>(&self, unit: U, halves: &Halves, group: usize, sums: &mut [f32]) {
        let (geometry, window) = (self.geometry, &self.window);
        let taps = geometry.kernel[0] * geometry.kernel[1];
        let pairs = halves.first.outputs(window);
        let mut rows = PackedRows::default();
        rows.pack_pairs(unit, geometry.group_outputs(), pairs, |rows, lines, distance| {
            vectorise!(|| self.gradients(unit, halves, group, rows, pairs, (lines, distance)));
        });
        let mut packed = vec![0; COLUMNS * pairs.min(2 * DEPTH)];
        for channels in channels(geometry) {
            let first = channels.start * taps;
            let cells = Cells::new(unit, self, halves, group, channels);
            let count = taps * cells.channels;
            for start in (0..count).step_by(COLUMNS) {
                let columns = start..(start + COLUMNS).min(count);
                for depth in (0..pairs).step_by(2 * DEPTH).map(|start| start..(start + 2 * DEPTH).min(pairs)) {
                    let panels = packed.chunks_exact_mut(WIDTH * depth.len());
                    for (at, panel) in columns.clone().step_by(WIDTH).zip(panels) {
                        let end = (at + WIDTH).min(columns.end);
                        vectorise!(|| cells.pack(at..end, depth.clone(), panel));
                    }
                    let (b, result) = ((&packed[..], columns.len()), (&mut sums[first + start..], geometry.taps()));
                    multiply_packed(unit, &rows, depth, b, result, true, self.threads);
                }
            }
        }
    }

    /// Collects the pairs of gradients of some output channels of a group, a line for each.
    #[inline(always)]
    fn gradients<U: Unit>(
        &self,
        unit: U,
        halves: &Halves,
        group: usize,
        channels: Range<usize>,
        pairs: usize,
        (lines, distance): (&mut [u32], usize),
    ) {
        let Self { geometry, window, dy, .. } = self;
        let [height, width] = geometry.output;
        let zeros = vec![bf16::ZERO; width];
        for Run { start, length, image, row, column } in window.runs(&halves.first, 0..pairs) {
            for (channel, line) in channels.clone().zip(lines.chunks_exact_mut(distance)) {
                let gradients = |image: usize, row: usize| {
                    let channel = image * geometry.co + group * geometry.group_outputs() + channel;
                    &dy[(channel * height + row) * width + column..][..length]
                };
                let second = halves.second.map(|[images, rows]| gradients(image + images, row + rows));
                unit.pair(gradients(image, row), second.unwrap_or(&zeros), &mut line[start..start + length]);
            }
        }
    }
}

/// The pairs of inputs of some channels; pairs of one place are side by side.
struct Cells {
    values: Vec<u32>,
    /// The distance from a place to the next.
    width: usize,
    channels: usize,
    planes: Planes,
    /// Where each tap sees the first place.
    taps: Vec<usize>,
}

impl Cells {
    fn new<U: Unit>(unit: U, part: &Part, halves: &Halves, group: usize, channels: Range<usize>) -> Self {
        let Part { geometry, window, x, .. } = part;
        let (inputs, pixels) = (geometry.group_inputs(), geometry.input_pixels());
        let sources = |channel: usize, image: usize| {
            let pixels = |image: usize| {
                let channel = image * geometry.ci + group * inputs + channels.start + channel;
                &x[channel * pixels..][..pixels]
            };
            [Some(pixels(image)), halves.second.map(|[images, _]| pixels(image + images))]
        };
        let shift = halves.second.map_or(0, |[_, rows]| rows * window.step[0]);
        let planes = vectorise!(|| Planes::new(unit, window, &halves.first, channels.len(), sources, shift));
        let (size, width) = (planes.size(), channels.len().next_multiple_of(LANES));
        let mut values = vec![0; size * width];
        for channel in (0..channels.len()).step_by(LANES) {
            let count = LANES.min(channels.len() - channel);
            unit.transpose_pairs(planes.from(channel * size), size, count, size, &mut values[channel..], width);
        }
        let taps = planes.starts(1, taps(geometry).iter().map(|tap| tap.offset));
        Self { values, width, channels: channels.len(), planes, taps }
    }

    /// Writes the pairs `depth` of a panel of columns, which are tap by tap the channels.
    #[inline(always)]
    fn pack(&self, columns: Range<usize>, depth: Range<usize>, panel: &mut [u32]) {
        let mut column = columns.start;
        while column < columns.end {
            let (tap, channel) = (column / self.channels, column % self.channels);
            let count = (self.channels - channel).min(columns.end - column);
            for run in self.planes.runs(depth.clone()) {
                let from = &self.values[(self.planes.start(&run) + self.taps[tap]) * self.width + channel..];
                let to = &mut panel[(run.start - depth.start) * WIDTH + column - columns.start..];
                if count == WIDTH {
                    to[..run.length * WIDTH].copy_from_slice(&from[..run.length * WIDTH]);
                    continue;
                }
                for (to, from) in to.chunks_mut(WIDTH).zip(from.chunks(self.width)).take(run.length) {
                    to[..count].copy_from_slice(&from[..count]);
                }
            }
            column += count;
        }
    }
}
