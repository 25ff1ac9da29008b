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

/// Adds columns, in the layout of [`im2col`], to the inputs that they came from.
#[inline(always)]
pub(super) fn col2im<R: Real>(geometry: &Geometry, group: usize, rows: Range<usize>, columns: &[R], x: &mut [R]) {
    let [width, out_width] = [geometry.input[1], geometry.output[1]];
    let length = rows.len() * out_width;
    let mut lines = columns.chunks_exact(length);
    for channel in channels(geometry, group) {
        for tap_y in 0..geometry.kernel[0] {
            let valid_y = geometry.valid(0, tap_y);
            for tap_x in 0..geometry.kernel[1] {
                let Some(line) = lines.next() else { return };
                let valid = geometry.valid(1, tap_x);
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

fn channels(geometry: &Geometry, group: usize) -> Range<usize> {
    let inputs = geometry.group_inputs();
    group * inputs..(group + 1) * inputs
}
