//! The convolutions themselves.
use super::descriptors::{Convolution, Tensor};
use super::{Kind, Operands, Problem};

/// # Safety
/// The operands must be allocated as `problem` describes them.
pub(super) unsafe fn calculate(kind: Kind, problem: &Problem, operands: &Operands) {
    let (Problem { x, w, y, convolution }, Some(dtype)) = (problem, problem.x.dtype) else { return };
    let count = |tensor: &Tensor| tensor.sizes.iter().product::<usize>();
    // SAFETY: guaranteed by the caller.
    let load =
        |address, tensor: &Tensor| (0..count(tensor)).map(|i| unsafe { dtype.read(address, i) }).collect::<Vec<_>>();
    let (result, of) = match kind {
        Kind::Forward => (operands.y, y),
        Kind::BackwardData => (operands.x, x),
        Kind::BackwardFilter => (operands.w, w),
    };
    let mut sums = vec![0.0; count(of)];
    // The old contents of the result are undefined, so they are not read.
    let values = |which: Kind, address, tensor| if kind == which { Vec::new() } else { load(address, tensor) };
    let (xs, ws, ys) = (
        values(Kind::BackwardData, operands.x, x),
        values(Kind::BackwardFilter, operands.w, w),
        values(Kind::Forward, operands.y, y),
    );
    let Convolution { padding, stride, dilation, groups, .. } = *convolution;
    let ([n, _, height, width], [co, group_inputs, kernel_y, kernel_x]) = (x.sizes, w.sizes);
    let [_, _, out_height, out_width] = y.sizes;
    for (image, output, input) in triples(n, co, group_inputs) {
        let channel = output / (co / groups) * group_inputs + input;
        for (tap_y, tap_x, out_y) in triples(kernel_y, kernel_x, out_height) {
            let Some(in_y) = (out_y * stride[0] + tap_y * dilation[0]).checked_sub(padding[0]) else { continue };
            if in_y >= height {
                continue;
            }
            for out_x in 0..out_width {
                let Some(in_x) = (out_x * stride[1] + tap_x * dilation[1]).checked_sub(padding[1]) else { continue };
                if in_x >= width {
                    continue;
                }
                let at_x = x.place([image, channel, in_y, in_x]);
                let at_w = w.place([output, input, tap_y, tap_x]);
                let at_y = y.place([image, output, out_y, out_x]);
                match kind {
                    Kind::Forward => sums[at_y] += xs[at_x] * ws[at_w],
                    Kind::BackwardData => sums[at_x] += ys[at_y] * ws[at_w],
                    Kind::BackwardFilter => sums[at_w] += xs[at_x] * ys[at_y],
                }
            }
        }
    }
    for (index, sum) in sums.into_iter().enumerate() {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let old = if operands.beta == 0.0 { 0.0 } else { operands.beta * dtype.read(result, index) };
            dtype.write(result, index, operands.alpha * sum + old);
        }
    }
}

fn triples(a: usize, b: usize, c: usize) -> impl Iterator<Item = (usize, usize, usize)> {
    (0..a).flat_map(move |i| (0..b).flat_map(move |j| (0..c).map(move |k| (i, j, k))))
}
