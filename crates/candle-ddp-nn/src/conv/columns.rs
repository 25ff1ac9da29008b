//! The columns of a convolution: the inputs that its kernel sees at each output position, and the reverse (im2col and
//! col2im).
use super::geometry::Geometry;
use candle_ddp_tensor::{Element, Real};
use std::ops::Range;

/// Writes the inputs that the kernels of `group` see at the output positions of `rows`: one column per position and
/// one row of `columns` per weight. Rows of outputs are numbered through all images; `x` has the images from the
/// first on.
#[inline(always)]
pub(super) fn im2col<T: Element>(
    geometry: &Geometry,
    group: usize,
    rows: Range<usize>,
    x: &[T],
    columns: &mut [T::Real],
) {
    let [width, out_width] = [geometry.input[1], geometry.output[1]];
    let zero = T::Real::default();
    let length = rows.len() * out_width;
    let mut lines = columns.chunks_exact_mut(length);
    for channel in channels(geometry, group) {
        for tap_y in 0..geometry.kernel[0] {
            let valid_y = geometry.valid(0, tap_y);
            for tap_x in 0..geometry.kernel[1] {
                let Some(line) = lines.next() else { return };
                let valid = geometry.valid(1, tap_x);
                if geometry.keeps_size() {
                    for run in runs(geometry, channel, [tap_y, tap_x], rows.clone()) {
                        let line = &mut line[run.lines];
                        let (before, rest) = line.split_at_mut(run.seen.start);
                        let (seen, after) = rest.split_at_mut(run.seen.len());
                        before.fill(zero);
                        seen.iter_mut().zip(&x[run.source..]).for_each(|(to, from)| *to = from.widen());
                        after.fill(zero);
                        clear_padding(seen, width, &valid);
                    }
                    continue;
                }
                for (row, line) in rows.clone().zip(line.chunks_exact_mut(out_width)) {
                    let (image, at) = (row / geometry.output[0], row % geometry.output[0]);
                    if !valid_y.contains(&at) || valid.is_empty() {
                        line.fill(zero);
                        continue;
                    }
                    let start = (image * geometry.ci + channel) * geometry.input_pixels();
                    let source = &x[start + geometry.seen(0, at, tap_y) * width..][..width];
                    line[..valid.start].fill(zero);
                    line[valid.end..].fill(zero);
                    let source = &source[geometry.seen(1, valid.start, tap_x)..];
                    let line = &mut line[valid.clone()];
                    match geometry.stride[1] {
                        1 => line.iter_mut().zip(source).for_each(|(to, from)| *to = from.widen()),
                        2 => line.iter_mut().zip(source.chunks(2)).for_each(|(to, from)| *to = from[0].widen()),
                        stride => {
                            line.iter_mut()
                                .zip(source.iter().step_by(stride))
                                .for_each(|(to, from)| *to = from.widen());
                        }
                    }
                }
            }
        }
    }
}

/// Adds columns, in the layout of [`im2col`], to the inputs that they came from. Those of padding are lost.
#[inline(always)]
pub(super) fn col2im<R: Real>(geometry: &Geometry, group: usize, rows: Range<usize>, columns: &mut [R], x: &mut [R]) {
    let [width, out_width] = [geometry.input[1], geometry.output[1]];
    let length = rows.len() * out_width;
    let mut lines = columns.chunks_exact_mut(length);
    for channel in channels(geometry, group) {
        for tap_y in 0..geometry.kernel[0] {
            let valid_y = geometry.valid(0, tap_y);
            for tap_x in 0..geometry.kernel[1] {
                let Some(line) = lines.next() else { return };
                let valid = geometry.valid(1, tap_x);
                if geometry.keeps_size() {
                    for run in runs(geometry, channel, [tap_y, tap_x], rows.clone()) {
                        let seen = &mut line[run.lines][run.seen];
                        clear_padding(seen, width, &valid);
                        x[run.source..].iter_mut().zip(seen).for_each(|(to, from)| *to += *from);
                    }
                    continue;
                }
                for (row, line) in rows.clone().zip(line.chunks_exact(out_width)) {
                    let (image, at) = (row / geometry.output[0], row % geometry.output[0]);
                    if !valid_y.contains(&at) || valid.is_empty() {
                        continue;
                    }
                    let start = (image * geometry.ci + channel) * geometry.input_pixels();
                    let target = &mut x[start + geometry.seen(0, at, tap_y) * width..][..width];
                    let target = &mut target[geometry.seen(1, valid.start, tap_x)..];
                    let line = &line[valid.clone()];
                    match geometry.stride[1] {
                        1 => target.iter_mut().zip(line).for_each(|(to, from)| *to += *from),
                        stride => target.iter_mut().step_by(stride).zip(line).for_each(|(to, from)| *to += *from),
                    }
                }
            }
        }
    }
}

/// Neighbouring rows of an image, of outputs and of inputs, in a convolution that [keeps the size](Geometry::keeps_size).
struct Run {
    /// The rows, in a line of columns.
    lines: Range<usize>,
    /// From the first to the last of these outputs that see the input through the tap. Between them are some that see padding, at the
    /// ends of each row.
    seen: Range<usize>,
    /// The input that the first of them sees. Each of the others sees the one at its distance from it.
    source: usize,
}

/// The runs of `rows` for a channel of the input and a tap of the kernel.
#[inline(always)]
fn runs(geometry: &Geometry, channel: usize, tap: [usize; 2], rows: Range<usize>) -> impl Iterator<Item = Run> {
    let ([height, width], channels) = (geometry.input, geometry.ci);
    let [valid_y, valid] = [0, 1].map(|axis| geometry.valid(axis, tap[axis]));
    by_image(height, rows).map(move |(image, here, start)| {
        let (first, count) = (here.start, here.len());
        let (start, plane) = (start * width, (image * channels + channel) * height);
        let (seen, end) = (valid_y.start.max(first), valid_y.end.min(first + count));
        let lines = start..start + count * width;
        if seen >= end || valid.is_empty() {
            return Run { lines, seen: 0..0, source: 0 };
        }
        let source = (plane + geometry.seen(0, seen, tap[0])) * width + geometry.seen(1, valid.start, tap[1]);
        let seen = (seen - first) * width + valid.start..(end - 1 - first) * width + valid.end;
        Run { lines, seen, source }
    })
}

/// Divides `rows`, which are numbered through all images of `height` rows: the image, its rows, and where they begin in `rows`.
#[inline(always)]
pub(super) fn by_image(height: usize, rows: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>, usize)> {
    let mut row = rows.start;
    std::iter::from_fn(move || {
        (row < rows.end).then(|| {
            let (image, first, start) = (row / height, row % height, row - rows.start);
            let count = (height - first).min(rows.end - row);
            row += count;
            (image, first..first + count, start)
        })
    })
}

/// Makes zeros of the outputs between the first and the last one `seen` that see padding, in rows of `width`.
#[inline(always)]
fn clear_padding<R: Real>(seen: &mut [R], width: usize, valid: &Range<usize>) {
    if valid.len() < width {
        seen.chunks_mut(width)
            .filter(|row| row.len() > valid.len())
            .for_each(|row| row[valid.len()..].fill(R::default()));
    }
}

fn channels(geometry: &Geometry, group: usize) -> Range<usize> {
    let inputs = geometry.group_inputs();
    group * inputs..(group + 1) * inputs
}

#[cfg(test)]
mod tests {
    use super::super::geometry::positions;
    use super::*;

    /// The columns by their definition: the place of each one, and the place of the input that it sees.
    fn pairs(geometry: &Geometry, group: usize, rows: Range<usize>) -> Vec<(usize, usize)> {
        let ([height, width], [in_height, in_width]) = (geometry.output, geometry.input);
        let (mut pairs, mut line) = (Vec::new(), 0);
        for channel in channels(geometry, group) {
            for (tap_y, tap_x) in (0..geometry.kernel[0]).flat_map(|y| (0..geometry.kernel[1]).map(move |x| (y, x))) {
                for (index, row) in rows.clone().enumerate() {
                    let (image, at) = (row / height, row % height);
                    for column in 0..width {
                        if geometry.valid(0, tap_y).contains(&at) && geometry.valid(1, tap_x).contains(&column) {
                            let y = (image * geometry.ci + channel) * in_height + geometry.seen(0, at, tap_y);
                            let place = (line * rows.len() + index) * width + column;
                            pairs.push((place, y * in_width + geometry.seen(1, column, tap_x)));
                        }
                    }
                }
                line += 1;
            }
        }
        pairs
    }

    #[test]
    fn columns_hold_what_the_kernel_sees() {
        for (kernel, stride, padding, dilation) in [
            ([1, 1], 1, [0, 0], 1),
            ([3, 3], 1, [1, 1], 1),
            ([3, 3], 1, [2, 2], 2),
            ([3, 3], 1, [6, 6], 6),
            ([1, 5], 1, [0, 2], 1),
            ([5, 1], 1, [2, 0], 1),
            ([3, 3], 2, [1, 1], 1),
            ([3, 2], 1, [1, 0], 1),
        ] {
            for (groups, rows) in [(1, 0..12), (2, 0..5), (1, 2..9), (2, 5..6)] {
                let input = [6, 8];
                let output =
                    [0, 1].map(|axis| positions(input[axis], kernel[axis], stride, padding[axis], dilation).unwrap());
                let (stride, dilation) = ([stride; 2], [dilation; 2]);
                let geometry =
                    Geometry { n: 2, ci: 4, co: 2, groups, input, output, kernel, stride, padding, dilation };
                let rows = rows.start.min(2 * output[0] - 1)..rows.end.min(2 * output[0]);
                let x: Vec<f64> = (1..=2 * 4 * 6 * 8).map(f64::from).collect();
                let mut columns = vec![f64::NAN; geometry.taps() * rows.len() * output[1]];
                let (mut expected, mut sums) = (vec![0.; columns.len()], vec![0.; x.len()]);
                for (place, seen) in pairs(&geometry, groups - 1, rows.clone()) {
                    expected[place] = x[seen];
                    sums[seen] += (place + 1) as f64;
                }
                im2col(&geometry, groups - 1, rows.clone(), &x, &mut columns);
                assert_eq!(columns, expected, "{geometry:?}, {rows:?}");
                let mut columns: Vec<_> = (1..=columns.len()).map(|place| place as f64).collect();
                let mut dx = vec![0.; x.len()];
                col2im(&geometry, groups - 1, rows.clone(), &mut columns, &mut dx);
                assert_eq!(dx, sums, "{geometry:?}, {rows:?}");
            }
        }
    }
}
