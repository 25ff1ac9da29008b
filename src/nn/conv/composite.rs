//! Convolutions made of candle's products and copies, whose gradients are right on every device: those of candle's own
//! convolutions are not.
use super::geometry::Geometry;
use candle_core::{Result, Tensor};

/// As [`convolution`](super::operation::convolution), whose checks `geometry` has passed.
pub(super) fn convolution(
    geometry: &Geometry,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    transposed: bool,
) -> Result<Tensor> {
    let Geometry { n, ci, co, groups, input, output, .. } = *geometry;
    let (taps, group_outputs) = (geometry.taps(), geometry.group_outputs());
    let weight = weight.reshape((1, groups, group_outputs, taps))?;
    let (y, channels, size) = if transposed {
        let x_groups = x.reshape((n, groups, group_outputs, geometry.output_pixels()))?;
        let columns = weight.transpose(2, 3)?.contiguous()?.broadcast_matmul(&x_groups)?;
        (fold(geometry, &columns)?, ci, input)
    } else {
        let image = x.reshape((n, ci, input[0], input[1]))?;
        let columns = unfold(geometry, &image)?.reshape((n, groups, taps, geometry.output_pixels()))?;
        (weight.broadcast_matmul(&columns)?, co, output)
    };
    let mut shape = vec![n, channels];
    shape.extend(if x.rank() == 4 { &size[..] } else { &size[1..] });
    let y = y.reshape(shape)?;
    let Some(bias) = bias else { return Ok(y) };
    let column = if x.rank() == 4 { bias.reshape((1, channels, 1, 1))? } else { bias.reshape((1, channels, 1))? };
    y.broadcast_add(&column)
}

/// What each tap of the kernel sees: (n, ci, taps of a channel, outputs) from (n, ci, height, width).
fn unfold(geometry: &Geometry, x: &Tensor) -> Result<Tensor> {
    let Geometry { output: [height, width], kernel, stride, padding, dilation, .. } = *geometry;
    let mut x = x.clone();
    for axis in 0..2 {
        // So that the last step is whole.
        x = x.pad_with_zeros(2 + axis, padding[axis], padding[axis] + stride[axis] - 1)?;
    }
    let mut taps = Vec::with_capacity(kernel[0] * kernel[1]);
    for tap in (0..kernel[0]).flat_map(|y| (0..kernel[1]).map(move |x| [y, x])) {
        let seen = x.narrow(2, tap[0] * dilation[0], height * stride[0])?;
        let seen = seen.narrow(3, tap[1] * dilation[1], width * stride[1])?.contiguous()?;
        let steps = seen.reshape((geometry.n, geometry.ci, height, stride[0], width, stride[1]))?;
        let seen = steps.narrow(3, 0, 1)?.narrow(5, 0, 1)?.contiguous()?;
        taps.push(seen.reshape((geometry.n, geometry.ci, height * width))?);
    }
    Tensor::stack(&taps, 2)
}

/// Adds what [`unfold`] gives to where it was seen: (n, ci, height, width) from (n, groups, taps, outputs).
fn fold(geometry: &Geometry, columns: &Tensor) -> Result<Tensor> {
    let Geometry { n, ci, input, output: [height, width], kernel, stride, padding, dilation, .. } = *geometry;
    let columns = columns.reshape((n, ci, kernel[0] * kernel[1], height, width))?;
    // Room for all that is seen, padding included, however far the last step reaches.
    let room = [0, 1].map(|axis| {
        let reach = (kernel[axis] - 1) * dilation[axis] + [height, width][axis] * stride[axis];
        reach.max(input[axis] + padding[axis])
    });
    let mut sum: Option<Tensor> = None;
    for (index, tap) in (0..kernel[0]).flat_map(|y| (0..kernel[1]).map(move |x| [y, x])).enumerate() {
        let steps = columns.narrow(2, index, 1)?.contiguous()?.reshape((n, ci, height, 1, width, 1))?;
        let steps = steps.pad_with_zeros(3, 0, stride[0] - 1)?.pad_with_zeros(5, 0, stride[1] - 1)?;
        let mut seen = steps.reshape((n, ci, height * stride[0], width * stride[1]))?;
        for axis in 0..2 {
            let before = tap[axis] * dilation[axis];
            let length = seen.dim(2 + axis)?;
            seen = seen.pad_with_zeros(2 + axis, before, room[axis] - before - length)?;
        }
        sum = Some(match sum {
            Some(sum) => (sum + seen)?,
            None => seen,
        });
    }
    match sum {
        Some(sum) => sum.narrow(2, padding[0], input[0])?.narrow(3, padding[1], input[1])?.contiguous(),
        None => candle_core::bail!("a kernel of size 0 sees nothing"),
    }
}
