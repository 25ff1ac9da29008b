//! Convolutions of bf16 by the processor's instructions for pairs, without columns (see `columns.rs`): factors are packed
//! right from the images. Products are exact, and sums in f32.
//!
//! A pair is two channels of the input, of the same tap. So the inputs of a tap at neighbouring outputs lie side by side,
//! once the images have zeros around them (`planes.rs`), and the depth of the products goes over pairs of channels and taps.
mod filter;
mod planes;
#[cfg(test)]
mod tests;

use super::geometry::Geometry;
use super::parts::each_part;
use crate::gemm::bf16::{LANES, PackedRows, Unit, WIDTH, multiply_packed, pair};
use candle_core::Result;
use candle_ddp_tensor::vectorise;
pub(super) use filter::backward_filter;
use half::bf16;
use planes::{Band, Planes, Window, copy_runs};
use std::ops::Range;

/// The columns of a block: their packed inputs stay in a core's second cache.
const COLUMNS: usize = 4 * WIDTH;
/// The largest depth of a block, in pairs: a panel of columns stays in a core's first cache.
const DEPTH: usize = 256;
/// The target size of a band's planes in cells. Tests have small images.
const BAND: usize = if cfg!(test) { 1 << 12 } else { 1 << 19 };

/// An element of a kernel: its offset in the window, and its place among the kernel's elements.
struct Tap {
    offset: [usize; 2],
    element: usize,
}

/// A pass from input images to output images: forward, or backward for some of the pixels.
struct Pass {
    window: Window,
    taps: Vec<Tap>,
    /// Channels of a group.
    inputs: usize,
    outputs: usize,
    groups: usize,
    /// The distance from one weight to the next output's, and the next input's.
    by_output: usize,
    by_input: usize,
    /// The size of output images, and the outputs' distances and the first output in them.
    size: [usize; 2],
    stride: [usize; 2],
    first: [usize; 2],
}

/// As [`forward`](super::cpu::forward), by `unit`.
pub(super) fn forward<U: Unit>(
    unit: U,
    geometry: &Geometry,
    x: &[bf16],
    weight: &[bf16],
    bias: Option<&[f32]>,
) -> Result<Vec<bf16>> {
    let pass = Pass {
        window: window(geometry),
        taps: taps(geometry),
        inputs: geometry.group_inputs(),
        outputs: geometry.group_outputs(),
        groups: geometry.groups,
        by_output: geometry.taps(),
        by_input: geometry.kernel[0] * geometry.kernel[1],
        size: geometry.output,
        stride: [1; 2],
        first: [0; 2],
    };
    run(unit, geometry, &[pass], x, weight, bias)
}

/// As [`backward_data`](super::cpu::backward_data), by `unit`.
///
/// The inputs that lie at the same place modulo the stride see the same taps of the outputs: they are one pass.
pub(super) fn backward_data<U: Unit>(
    unit: U,
    geometry: &Geometry,
    dy: &[bf16],
    weight: &[bf16],
    bias: Option<&[f32]>,
) -> Result<Vec<bf16>> {
    let [height, width] = geometry.stride.map(|stride| 0..stride);
    let phases = height.flat_map(|y| width.clone().map(move |x| [y, x]));
    let passes: Vec<_> = phases
        .filter(|first| (0..2).all(|axis| first[axis] < geometry.input[axis]))
        .map(|first| {
            let axes = [0, 1].map(|axis| phase(geometry, axis, first[axis]));
            let taps = axes[0].1.iter().flat_map(|(y, tap_y)| {
                let row = tap_y * geometry.kernel[1];
                axes[1].1.iter().map(move |(x, tap_x)| Tap { offset: [*y, *x], element: row + tap_x })
            });
            let reach = |axis: usize| axes[axis].1.iter().map(|(offset, _)| *offset).max().unwrap_or(0);
            Pass {
                window: Window {
                    size: geometry.output,
                    padding: [axes[0].0, axes[1].0],
                    step: [1; 2],
                    reach: [reach(0), reach(1)],
                    outputs: [0, 1].map(|axis| (geometry.input[axis] - first[axis]).div_ceil(geometry.stride[axis])),
                },
                taps: taps.collect(),
                inputs: geometry.group_outputs(),
                outputs: geometry.group_inputs(),
                groups: geometry.groups,
                by_output: geometry.kernel[0] * geometry.kernel[1],
                by_input: geometry.taps(),
                size: geometry.input,
                stride: geometry.stride,
                first,
            }
        })
        .collect();
    run(unit, geometry, &passes, dy, weight, bias)
}

/// The window of the inputs that a convolution's outputs see.
fn window(geometry: &Geometry) -> Window {
    Window {
        size: geometry.input,
        padding: geometry.padding,
        step: geometry.stride,
        reach: [0, 1].map(|axis| (geometry.kernel[axis] - 1) * geometry.dilation[axis]),
        outputs: geometry.output,
    }
}

/// The taps of a convolution, in the order of its kernel's elements.
fn taps(geometry: &Geometry) -> Vec<Tap> {
    let ([height, width], [down, right]) = (geometry.kernel, geometry.dilation);
    let tap = |element: usize| Tap { offset: [element / width * down, element % width * right], element };
    (0..height * width).map(tap).collect()
}

/// Along an axis, for the inputs `first`, `first` + stride, …: the padding, and the offsets and numbers of the taps that
/// connect them with outputs.
fn phase(geometry: &Geometry, axis: usize, first: usize) -> (usize, Vec<(usize, usize)>) {
    let stride = geometry.stride[axis];
    let position = first + geometry.padding[axis];
    // How far after the phase's n-th input the n-th output lies that it sees by a tap, as (ahead, behind), one of them 0.
    let taps: Vec<_> = (0..geometry.kernel[axis])
        .filter_map(|tap| {
            let shift = tap * geometry.dilation[axis];
            let distance = position.abs_diff(shift);
            distance.is_multiple_of(stride).then_some(match position >= shift {
                true => (distance / stride, 0, tap),
                false => (0, distance / stride, tap),
            })
        })
        .collect();
    let padding = taps.iter().map(|(_, behind, _)| *behind).max().unwrap_or(0);
    (padding, taps.into_iter().map(|(ahead, behind, tap)| (padding + ahead - behind, tap)).collect())
}

/// The images that all passes together result in.
fn run<U: Unit>(
    unit: U,
    geometry: &Geometry,
    passes: &[Pass],
    x: &[bf16],
    weight: &[bf16],
    bias: Option<&[f32]>,
) -> Result<Vec<bf16>> {
    let Some(Pass { inputs, outputs, groups, size, window, .. }) = passes.first() else { return Ok(Vec::new()) };
    let from = inputs * groups * window.size[0] * window.size[1];
    let to = outputs * groups * size[0] * size[1];
    let weights: Vec<Vec<PackedRows>> = passes
        .iter()
        .map(|pass| (0..pass.groups).map(|group| pass.pack_weights(unit, group, weight)).collect())
        .collect();
    let mut y = vec![bf16::ZERO; geometry.n * to];
    each_part(geometry, to, &mut y, |part, y, threads| {
        let x = &x[part.start * from..part.end * from];
        for (pass, weights) in passes.iter().zip(&weights) {
            let images = part.len();
            for band in pass.window.bands(images, pass.inputs.div_ceil(2), BAND) {
                for (group, weights) in weights.iter().enumerate() {
                    pass.band(unit, &band, group, x, weights, bias, y, threads);
                }
            }
        }
        Ok(())
    })?;
    Ok(y)
}

impl Pass {
    /// The depth of the products in pairs.
    fn pairs(&self) -> usize {
        self.inputs.div_ceil(2) * self.taps.len()
    }

    /// The weights of a group, with an output per row.
    fn pack_weights<U: Unit>(&self, unit: U, group: usize, weight: &[bf16]) -> PackedRows {
        let weight = &weight[group * (weight.len() / self.groups)..];
        let pairs = self.pairs();
        let mut packed = PackedRows::default();
        packed.pack_pairs(unit, self.outputs, pairs, |rows, lines, distance| {
            vectorise!(|| {
                for (output, line) in rows.zip(lines.chunks_exact_mut(distance)) {
                    self.weight_pairs(unit, &weight[output * self.by_output..], &mut line[..pairs]);
                }
            });
        });
        packed
    }

    /// The weights of an output; each input's and the next one's are side by side.
    #[inline(always)]
    fn weight_pairs<U: Unit>(&self, unit: U, weight: &[bf16], line: &mut [u32]) {
        let taps = self.taps.len();
        // Calls for fewer taps take longer than a loop over them.
        let in_order = taps > 3 && self.taps.iter().enumerate().all(|(at, tap)| tap.element == at);
        for (input, line) in (0..self.inputs).step_by(2).zip(line.chunks_exact_mut(taps)) {
            let first = &weight[input * self.by_input..];
            let second = (input + 1 < self.inputs).then(|| &first[self.by_input..]);
            if let Some(second) = second.filter(|_| in_order) {
                unit.pair(&first[..taps], &second[..taps], line);
                continue;
            }
            for (tap, to) in self.taps.iter().zip(line) {
                let second = second.map_or(bf16::ZERO, |second| second[tap.element]);
                *to = pair(first[tap.element], second);
            }
        }
    }

    /// The outputs of a band and a group.
    #[expect(clippy::too_many_arguments)]
    fn band<U: Unit>(
        &self,
        unit: U,
        band: &Band,
        group: usize,
        x: &[bf16],
        weights: &PackedRows,
        bias: Option<&[f32]>,
        y: &mut [bf16],
        threads: usize,
    ) {
        if self.taps.is_empty() && bias.is_none() {
            return;
        }
        let planes = vectorise!(|| self.pair_planes(unit, band, group, x));
        let starts = planes.starts(self.inputs.div_ceil(2), self.taps.iter().map(|tap| tap.offset));
        let (count, pairs) = (band.outputs(&self.window), self.pairs());
        let columns = COLUMNS.min(count);
        let mut sums = vec![0.0; self.outputs * columns];
        let depth = pairs.div_ceil(pairs.div_ceil(DEPTH).max(1)).next_multiple_of(LANES).min(pairs);
        let mut packed = vec![0; columns.next_multiple_of(WIDTH) * depth];
        for start in (0..count).step_by(COLUMNS) {
            let range = start..(start + COLUMNS).min(count);
            for first in (0..pairs).step_by(depth.max(1)) {
                let depth = first..(first + depth).min(pairs);
                vectorise!(|| {
                    for (start, panel) in range.clone().step_by(WIDTH).zip(packed.chunks_exact_mut(WIDTH * depth.len()))
                    {
                        for run in planes.runs(start..(start + WIDTH).min(range.end)) {
                            let at = planes.start(&run);
                            let from = starts[depth.clone()].iter().map(|start| planes.from(start + at));
                            copy_runs(panel, (run.start - start, WIDTH), run.length, from);
                        }
                    }
                });
                let (b, result) = ((&packed[..], range.len()), (&mut sums[..], range.len()));
                multiply_packed(unit, weights, depth, b, result, first > 0, threads);
            }
            vectorise!(|| self.write(unit, band, range.clone(), group, &sums, bias, y));
        }
    }

    /// The images of a band, with pairs of channels as planes.
    #[inline(always)]
    fn pair_planes<U: Unit>(&self, unit: U, band: &Band, group: usize, x: &[bf16]) -> Planes {
        let pixels = self.window.size[0] * self.window.size[1];
        let planes = |pair: usize, image: usize| {
            let first = (image * self.groups + group) * self.inputs + 2 * pair;
            let plane = |channel: usize| &x[channel * pixels..][..pixels];
            [Some(plane(first)), (2 * pair + 1 < self.inputs).then(|| plane(first + 1))]
        };
        Planes::new(unit, &self.window, band, self.inputs.div_ceil(2), planes, 0)
    }

    /// Writes sums, with an output channel per row, to the images.
    #[inline(always)]
    #[expect(clippy::too_many_arguments)]
    fn write<U: Unit>(
        &self,
        unit: U,
        band: &Band,
        range: Range<usize>,
        group: usize,
        sums: &[f32],
        bias: Option<&[f32]>,
        y: &mut [bf16],
    ) {
        let ([height, width], [down, right]) = (self.size, self.stride);
        // Where the runs lie in the first channel's images. Rows that follow each other are one run.
        let mut runs: Vec<(Range<usize>, usize)> = Vec::new();
        for run in self.window.runs(band, range.clone()) {
            let row = run.image * self.groups * self.outputs * height + run.row * down + self.first[0];
            let (from, to) = (run.start - range.start, row * width + run.column * right + self.first[1]);
            match runs.last_mut() {
                Some((last, place)) if right == 1 && to == *place + last.len() => last.end += run.length,
                _ => runs.push((from..from + run.length, to)),
            }
        }
        let mut line = [bf16::ZERO; COLUMNS];
        for (output, sums) in sums.chunks_exact(range.len()).take(self.outputs).enumerate() {
            let channel = group * self.outputs + output;
            let bias = bias.map_or(0.0, |bias| bias[channel]);
            for (from, to) in &runs {
                let (from, y) = (&sums[from.clone()], &mut y[channel * height * width + to..]);
                if right == 1 {
                    unit.round(from, bias, &mut y[..from.len()]);
                    continue;
                }
                unit.round(from, bias, &mut line);
                y.iter_mut().step_by(right).zip(&line[..from.len()]).for_each(|(y, value)| *y = *value);
            }
        }
    }
}
