//! Convolutions of each channel with its own kernel: loops over rows instead of matrix products.
use super::geometry::Geometry;
use candle_core::WithDType;
use candle_ddp_tensor::Element;

/// Calls `work` for each channel of each image and each pair of an input row and an output row that a row of the
/// kernel connects, with (channel, the row of the kernel, where the input's row starts, where the output's row
/// starts).
#[inline(always)]
fn each_row(geometry: &Geometry, mut work: impl FnMut(usize, usize, usize, usize)) {
    let ([_, width], [height, out_width]) = (geometry.input, geometry.output);
    for plane in 0..geometry.n * geometry.ci {
        for at in 0..height {
            for tap_y in 0..geometry.kernel[0] {
                if geometry.valid(0, tap_y).contains(&at) {
                    let input = plane * geometry.input_pixels() + geometry.seen(0, at, tap_y) * width;
                    work(plane % geometry.ci, tap_y, input, (plane * height + at) * out_width);
                }
            }
        }
    }
}

#[inline(always)]
pub(super) fn forward<T: Element>(
    geometry: &Geometry,
    x: &[T],
    weight: &[T::Real],
    bias: Option<&[T::Real]>,
    y: &mut [T],
) {
    let ([_, width], [height, out_width], [kernel_y, kernel_x]) = (geometry.input, geometry.output, geometry.kernel);
    let mut line = vec![T::Real::from_f64(0.0); out_width];
    for plane in 0..geometry.n * geometry.ci {
        let channel = plane % geometry.ci;
        let start = bias.map_or(T::Real::from_f64(0.0), |bias| bias[channel]);
        for at in 0..height {
            line.fill(start);
            for tap_y in (0..kernel_y).filter(|tap| geometry.valid(0, *tap).contains(&at)) {
                let row = plane * geometry.input_pixels() + geometry.seen(0, at, tap_y) * width;
                let row = &x[row..row + width];
                for tap_x in 0..kernel_x {
                    let valid = geometry.valid(1, tap_x);
                    if valid.is_empty() {
                        continue;
                    }
                    let factor = weight[(channel * kernel_y + tap_y) * kernel_x + tap_x];
                    let source = &row[geometry.seen(1, valid.start, tap_x)..];
                    let line = &mut line[valid];
                    match geometry.stride[1] {
                        1 => line.iter_mut().zip(source).for_each(|(to, from)| *to += from.widen() * factor),
                        stride => {
                            let source = source.iter().step_by(stride);
                            line.iter_mut().zip(source).for_each(|(to, from)| *to += from.widen() * factor);
                        }
                    }
                }
            }
            let y = &mut y[(plane * height + at) * out_width..][..out_width];
            y.iter_mut().zip(&line).for_each(|(y, value)| *y = T::narrow(*value));
        }
    }
}

#[inline(always)]
pub(super) fn backward_data<T: Element>(geometry: &Geometry, dy: &[T], weight: &[T::Real], dx: &mut [T::Real]) {
    let [kernel_y, kernel_x] = geometry.kernel;
    each_row(geometry, |channel, tap_y, input, output| {
        for tap_x in 0..kernel_x {
            let valid = geometry.valid(1, tap_x);
            if valid.is_empty() {
                continue;
            }
            let factor = weight[(channel * kernel_y + tap_y) * kernel_x + tap_x];
            let target = &mut dx[input..input + geometry.input[1]][geometry.seen(1, valid.start, tap_x)..];
            let source = &dy[output..output + geometry.output[1]][valid];
            match geometry.stride[1] {
                1 => target.iter_mut().zip(source).for_each(|(to, from)| *to += from.widen() * factor),
                stride => {
                    let target = target.iter_mut().step_by(stride);
                    target.zip(source).for_each(|(to, from)| *to += from.widen() * factor);
                }
            }
        }
    });
}

#[inline(always)]
pub(super) fn backward_filter<T: Element>(geometry: &Geometry, x: &[T], dy: &[T], sum: &mut [T::Real]) {
    let [kernel_y, kernel_x] = geometry.kernel;
    each_row(geometry, |channel, tap_y, input, output| {
        for tap_x in 0..kernel_x {
            let valid = geometry.valid(1, tap_x);
            if valid.is_empty() {
                continue;
            }
            let x = &x[input..input + geometry.input[1]][geometry.seen(1, valid.start, tap_x)..];
            let dy = &dy[output..output + geometry.output[1]][valid];
            let dot = match geometry.stride[1] {
                1 => dot(x, dy),
                stride => {
                    let terms = x.iter().step_by(stride).zip(dy).map(|(x, dy)| x.widen() * dy.widen());
                    terms.fold(T::Real::from_f64(0.0), |sum, term| sum + term)
                }
            };
            sum[(channel * kernel_y + tap_y) * kernel_x + tap_x] += dot;
        }
    });
}

/// Σ a·b over the elements that both have, in independent partial sums, so that the compiler can use vectors.
#[inline(always)]
fn dot<T: Element>(a: &[T], b: &[T]) -> T::Real {
    const LANES: usize = 16;
    let length = a.len().min(b.len());
    let (a, b) = (a[..length].chunks_exact(LANES), b[..length].chunks_exact(LANES));
    let rest = a.remainder().iter().zip(b.remainder());
    let mut lanes = [T::Real::from_f64(0.0); LANES];
    for (a, b) in a.zip(b) {
        for (lane, (a, b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
            *lane += a.widen() * b.widen();
        }
    }
    let sum = rest.fold(T::Real::from_f64(0.0), |sum, (a, b)| sum + a.widen() * b.widen());
    lanes.into_iter().fold(sum, |sum, lane| sum + lane)
}
