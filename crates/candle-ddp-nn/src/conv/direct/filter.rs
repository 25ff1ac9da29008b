//! The gradient of the weights: a product whose depth goes over pairs of neighbouring outputs.
use super::planes::{Band, Planes, Window, copy_runs};
use super::{BAND, COLUMNS, DEPTH, taps, window};
use crate::conv::geometry::Geometry;
use crate::conv::parts::sum_parts;
use crate::gemm::bf16::{LANES, PackedRows, Unit, WIDTH, multiply_packed};
use candle_core::Result;
use candle_ddp_tensor::vectorise;
use half::bf16;
use std::ops::Range;

/// As [`backward_filter`](crate::conv::cpu::backward_filter), by `unit`.
pub(in crate::conv) fn backward_filter<U: Unit>(
    unit: U,
    geometry: &Geometry,
    x: &[bf16],
    dy: &[bf16],
) -> Result<Vec<f32>> {
    let window = window(geometry);
    let (inputs, outputs) = (geometry.ci * geometry.input_pixels(), geometry.co * geometry.output_pixels());
    let size = geometry.co * geometry.taps();
    sum_parts(geometry, size, |part, threads| {
        let (x, dy) = (&x[part.start * inputs..part.end * inputs], &dy[part.start * outputs..part.end * outputs]);
        let mut sum = vec![0.0; size];
        for band in window.bands(part.len(), geometry.group_inputs(), BAND) {
            for (group, sum) in sum.chunks_exact_mut(geometry.group_outputs() * geometry.taps()).enumerate() {
                add_band(unit, geometry, &window, &band, group, x, dy, sum, threads);
            }
        }
        Ok(sum)
    })
}

/// Adds what a band and a group contribute.
#[expect(clippy::too_many_arguments)]
fn add_band<U: Unit>(
    unit: U,
    geometry: &Geometry,
    window: &Window,
    band: &Band,
    group: usize,
    x: &[bf16],
    dy: &[bf16],
    sum: &mut [f32],
    threads: usize,
) {
    let (inputs, pixels) = (geometry.group_inputs(), geometry.input_pixels());
    let channels =
        |channel: usize, image: usize| [&x[(image * geometry.ci + group * inputs + channel) * pixels..][..pixels]; 2];
    let planes = vectorise!(|| Planes::new(window, band, inputs, channels, |pixel, _| pixel));
    let starts = planes.starts(inputs, taps(geometry).iter().map(|tap| tap.offset));
    let (count, row) = (band.outputs(window), geometry.taps());
    let mut rows = PackedRows::default();
    let mut lines = vec![bf16::ZERO; LANES * 2 * DEPTH];
    let mut packed = vec![0; COLUMNS * DEPTH];
    for start in (0..count).step_by(2 * DEPTH) {
        let range = start..(start + 2 * DEPTH).min(count);
        let (depth, pairs) = (range.len(), range.len().div_ceil(2));
        rows.pack(unit, geometry.group_outputs(), pairs, |rows, to| {
            let width = rows.len();
            vectorise!(|| gradients(geometry, window, band, group, rows, range.clone(), dy, &mut lines));
            unit.transpose(&lines, 2 * DEPTH, width, depth, to, width);
        });
        for column in (0..row).step_by(COLUMNS) {
            let columns = COLUMNS.min(row - column);
            for (at, panel) in (0..columns).step_by(WIDTH).zip(packed.chunks_exact_mut(WIDTH * pairs)) {
                for lane in (0..WIDTH.min(columns - at)).step_by(LANES) {
                    let first = column + at + lane;
                    let count = LANES.min(row - first);
                    vectorise!(|| {
                        for run in window.runs(band, range.clone()) {
                            let seen = planes.start(&run);
                            let from = starts[first..first + count].iter().map(|start| planes.from(start + seen));
                            copy_runs(&mut lines, (run.start - start, 2 * DEPTH), run.length, from);
                        }
                    });
                    unit.transpose(&lines, 2 * DEPTH, count, depth, &mut panel[lane..], WIDTH);
                }
            }
            multiply_packed(unit, &rows, 0..pairs, (&packed, columns), (&mut sum[column..], row), true, threads);
        }
    }
}

/// Collects gradients of some output channels of a group, a line for each.
#[inline(always)]
#[expect(clippy::too_many_arguments)]
fn gradients(
    geometry: &Geometry,
    window: &Window,
    band: &Band,
    group: usize,
    channels: Range<usize>,
    range: Range<usize>,
    dy: &[bf16],
    lines: &mut [bf16],
) {
    let [height, width] = geometry.output;
    for run in window.runs(band, range.clone()) {
        let from = channels.clone().map(|channel| {
            let channel = run.image * geometry.co + group * geometry.group_outputs() + channel;
            &dy[(channel * height + run.row) * width + run.column..]
        });
        copy_runs(lines, (run.start - range.start, 2 * DEPTH), run.length, from);
    }
}
