//! Pooling by the average.
use super::pool::windows;
use super::resample::{Axis, plane, resample};
use candle_core::{Result, Tensor, ToUsize2};
use candle_ddp_tensor::Error;

/// Options of [`avg_pool2d`]. The default is PyTorch's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AvgPool2dOptions {
    /// The distance between windows, in rows and columns. `None`, the default: the size of a window.
    pub stride: Option<(usize, usize)>,
    /// The number of rows and columns of zeros added at each border, at most half a window; 0 by default.
    pub padding: (usize, usize),
    /// Whether windows may reach beyond the (padded) input at the bottom and at the right; `false` by default.
    pub ceil_mode: bool,
    /// Whether padding counts in the divisor; `true` by default.
    pub count_include_pad: bool,
}

impl Default for AvgPool2dOptions {
    fn default() -> Self {
        Self { stride: None, padding: (0, 0), ceil_mode: false, count_include_pad: true }
    }
}

/// The average of every window of `kernel` rows and columns (`2`, or `(2, 3)`): `torch.nn.functional.avg_pool2d`.
///
/// `x` has the shape (N, C, H, W) or (C, H, W) and the dtype f32, f64, f16 or bf16; the sum is calculated in f32 (f64
/// for f64). The result has the height (H + 2 × padding − kernel) / stride + 1, rounded down, and its width follows
/// the same rule. Unlike with candle's `avg_pool2d`, the gradient is correct for all sizes, and windows may overlap.
///
/// ```
/// # use candle_core::{Device, Result, Tensor};
/// # fn main() -> Result<()> {
/// use candle_ddp_nn::{AvgPool2dOptions, avg_pool2d};
/// let x = Tensor::arange(0f32, 16., &Device::Cpu)?.reshape((1, 4, 4))?;
/// let y = avg_pool2d(&x, 2, AvgPool2dOptions::default())?;
/// assert_eq!(y.to_vec3::<f32>()?, [[[2.5, 4.5], [10.5, 12.5]]]);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`InvalidArgument`](candle_ddp_tensor::Error::Base), carried by candle's error, for another rank, an empty
/// plane, a kernel or stride of 0, padding of more than half a window, and windows larger than the padded input;
/// [`Error::UnsupportedDType`](candle_ddp_tensor::Error::UnsupportedDType).
pub fn avg_pool2d(x: &Tensor, kernel: impl ToUsize2, options: AvgPool2dOptions) -> Result<Tensor> {
    const INPUT: &str = "the input of avg_pool2d";
    let (height, width) = plane(x, INPUT)?;
    let (kernel, AvgPool2dOptions { stride, padding, ceil_mode, count_include_pad }) = (kernel.to_usize2(), options);
    let stride = stride.unwrap_or(kernel);
    let axis = |size, kernel, stride, padding| {
        let windows = windows(size, kernel, stride, padding, ceil_mode)?;
        let average = |index| {
            let (inside, padded) = (windows.inside(index), windows.padded(index));
            let count = if count_include_pad { padded } else { inside.len() };
            (inside.start, vec![1.0 / count.max(1) as f64; inside.len()])
        };
        Ok::<_, candle_core::Error>(Axis::new(size, windows.count, average))
    };
    let rows = axis(height, kernel.0, stride.0, padding.0)?;
    let columns = axis(width, kernel.1, stride.1, padding.1)?;
    resample(x, "avg_pool2d", rows, columns)
}

/// The averages of `size` windows in each direction that together cover the input:
/// `torch.nn.functional.adaptive_avg_pool2d`. `1` is the global average. Of `n` windows over `h` rows, window `i` begins at
/// `i × h / n`, rounded down, and ends before `(i + 1) × h / n`, rounded up.
///
/// `x` has the shape (N, C, H, W) or (C, H, W) and the dtype f32, f64, f16 or bf16; the result has the height `size.0`
/// and the width `size.1`.
///
/// # Errors
/// [`InvalidArgument`](candle_ddp_tensor::Error::Base), carried by candle's error, for another rank, an empty
/// plane and a size of 0; [`Error::UnsupportedDType`](candle_ddp_tensor::Error::UnsupportedDType).
pub fn adaptive_avg_pool2d(x: &Tensor, size: impl ToUsize2) -> Result<Tensor> {
    let (height, width) = plane(x, "the input of adaptive_avg_pool2d")?;
    let size = size.to_usize2();
    if size.0 == 0 || size.1 == 0 {
        return Err(Error::invalid(
            "the size of adaptive_avg_pool2d",
            format!("it must be at least 1 × 1, not {size:?}"),
        )
        .into());
    }
    let axis = |input: usize, output: usize| {
        Axis::new(input, output, |index| {
            let (start, end) = (index * input / output, ((index + 1) * input).div_ceil(output));
            (start, vec![1.0 / (end - start) as f64; end - start])
        })
    };
    resample(x, "adaptive_avg_pool2d", axis(height, size.0), axis(width, size.1))
}
