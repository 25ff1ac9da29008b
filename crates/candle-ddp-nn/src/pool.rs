//! The positions of pooling windows.
use candle_core::Result;
use candle_ddp_tensor::Error;
use std::ops::Range;

/// The windows along one dimension.
#[derive(Clone, Copy, Debug)]
pub(super) struct Windows {
    /// The number of windows.
    pub(super) count: usize,
    pub(super) size: usize,
    pub(super) kernel: usize,
    pub(super) stride: usize,
    pub(super) padding: usize,
}

impl Windows {
    /// The inputs in a window.
    pub(super) fn inside(&self, index: usize) -> Range<usize> {
        let start = index * self.stride;
        start.saturating_sub(self.padding)..(start + self.kernel).saturating_sub(self.padding).min(self.size)
    }

    /// The number of inputs and padding places in a window.
    pub(super) fn padded(&self, index: usize) -> usize {
        let start = index * self.stride;
        (start + self.kernel).min(self.size + 2 * self.padding) - start
    }
}

/// The windows over `size` inputs, placed as in PyTorch.
///
/// # Errors
/// [`InvalidArgument`](Error::Base) for a kernel or stride of 0, padding of more than half a window, and an input in which
/// no window fits.
pub(super) fn windows(size: usize, kernel: usize, stride: usize, padding: usize, ceil_mode: bool) -> Result<Windows> {
    let invalid = |argument, reason: String| Err(Error::invalid(argument, reason).into());
    if kernel == 0 || stride == 0 {
        return invalid(
            "the windows of a pool",
            format!(
                "kernel and stride must be at least 1, not {kernel} and \
                                                         {stride}"
            ),
        );
    }
    if padding > kernel / 2 {
        return invalid(
            "the padding of a pool",
            format!("it must be at most half of the kernel, {kernel}, not {padding}"),
        );
    }
    let Some(rest) = (size + 2 * padding).checked_sub(kernel) else {
        let reason = format!(
            "it must fit a window: {size} rows or columns with a padding of {padding} are smaller \
                              than the kernel, {kernel}"
        );
        return invalid("the input of a pool", reason);
    };
    let mut count = if ceil_mode { rest.div_ceil(stride) } else { rest / stride } + 1;
    // The last window must begin in the input or the padding before it.
    if (count - 1) * stride >= size + padding {
        count -= 1;
    }
    Ok(Windows { count, size, kernel, stride, padding })
}
