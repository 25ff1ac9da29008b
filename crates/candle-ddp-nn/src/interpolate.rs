//! Changing the size of planes.
use super::resample::{Axis, plane, resample};
use candle_core::{DType, Result, Tensor, ToUsize2};
use candle_ddp_tensor::Error;

/// The inputs from which [`interpolate`] computes an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InterpolateMode {
    /// The input that output `i` falls on: `i × (input / output)`, rounded down, calculated in f32 (f64 for f64).
    Nearest,
    /// The four inputs around it, weighted by their distance.
    Bilinear {
        /// Whether the centres of the corner elements of input and output coincide. Otherwise their outer corners
        /// coincide, and positions outside the input have the value at the border.
        align_corners: bool,
    },
}

/// Resizes every plane to `size` rows and columns: `torch.nn.functional.interpolate(x, size, mode=…,
/// align_corners=…)`.
///
/// `x` has the shape (N, C, H, W) or (C, H, W) and the dtype f32, f64, f16 or bf16. candle's `upsample_nearest2d`
/// loses gradients if its input is used elsewhere too, and `upsample_bilinear2d` has none; here both are correct. For
/// PyTorch's `scale_factor`, set `size` to that multiple of the input's size; the factor must result in whole
/// numbers.
///
/// ```
/// # use candle_core::{Device, Result, Tensor};
/// # fn main() -> Result<()> {
/// use candle_ddp_nn::{InterpolateMode, interpolate};
/// let x = Tensor::new(&[[[1f32, 3.]]], &Device::Cpu)?;
/// let nearest = interpolate(&x, (1, 4), InterpolateMode::Nearest)?;
/// assert_eq!(nearest.to_vec3::<f32>()?, [[[1., 1., 3., 3.]]]);
/// let bilinear = interpolate(&x, (1, 4), InterpolateMode::Bilinear { align_corners: false })?;
/// assert_eq!(bilinear.to_vec3::<f32>()?, [[[1., 1.5, 2.5, 3.]]]);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`InvalidArgument`](candle_ddp_tensor::Error::Base), carried by candle's error, for another rank, an empty
/// plane and a size of 0; [`Error::UnsupportedDType`](candle_ddp_tensor::Error::UnsupportedDType).
pub fn interpolate(x: &Tensor, size: impl ToUsize2, mode: InterpolateMode) -> Result<Tensor> {
    let (height, width) = plane(x, "the input of interpolate")?;
    let size = size.to_usize2();
    if size.0 == 0 || size.1 == 0 {
        return Err(
            Error::invalid("the size of interpolate", format!("it must be at least 1 × 1, not {size:?}")).into()
        );
    }
    let axis = |input: usize, output: usize| match mode {
        InterpolateMode::Nearest => {
            Axis::new(input, output, |index| (nearest(index, input, output, x.dtype()), vec![1.0]))
        }
        InterpolateMode::Bilinear { align_corners } => {
            Axis::new(input, output, |index| linear(index, input, output, align_corners))
        }
    };
    resample(x, "interpolate", axis(height, size.0), axis(width, size.1))
}

fn nearest(index: usize, input: usize, output: usize, dtype: DType) -> usize {
    // PyTorch calculates in the precision of the input, which decides the result if the quotient is not exact.
    let position = match dtype {
        DType::F64 => (index as f64 * (input as f64 / output as f64)) as usize,
        _ => (index as f32 * (input as f32 / output as f32)) as usize,
    };
    position.min(input - 1)
}

fn linear(index: usize, input: usize, output: usize, align_corners: bool) -> (usize, Vec<f64>) {
    let position = if align_corners {
        if output > 1 { index as f64 * (input - 1) as f64 / (output - 1) as f64 } else { 0.0 }
    } else {
        ((index as f64 + 0.5) * input as f64 / output as f64 - 0.5).max(0.0)
    };
    let start = (position as usize).min(input - 1);
    let weight = (position - start as f64).min(1.0);
    // At the border there is only one input, whose weight must be 1.
    if start + 1 == input { (start, vec![1.0]) } else { (start, vec![1.0 - weight, weight]) }
}
