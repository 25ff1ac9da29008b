//! Where the windows of pooling lie.
use candle_core::Result;
use candle_ddp_tensor::Error;
use std::ops::Range;

/// The windows along one dimension.
#[derive(Clone, Copy, Debug)]
pub(super) struct Windows {
    /// How many there are.
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

    /// How many inputs and places of padding there are in a window.
    pub(super) fn padded(&self, index: usize) -> usize {
        let start = index * self.stride;
        (start + self.kernel).min(self.size + 2 * self.padding) - start
    }
}

/// The windows over `size` inputs, as PyTorch lays them.
///
/// # Errors
/// [`Error::InvalidArgument`] for a kernel or stride of 0, padding of more than half a window, and where no window
/// fits.
pub(super) fn windows(size: usize, kernel: usize, stride: usize, padding: usize, ceil_mode: bool) -> Result<Windows> {
    let invalid = |argument, reason: String| Err(Error::invalid(argument, reason).into());
    if kernel == 0 || stride == 0 {
        return invalid("the windows of a pool", format!("kernel {kernel} and stride {stride} must not be 0"));
    }
    if padding > kernel / 2 {
        return invalid("the padding of a pool", format!("it is {padding}, more than half of the kernel of {kernel}"));
    }
    let Some(rest) = (size + 2 * padding).checked_sub(kernel) else {
        let reason = format!("{size} rows or columns with a padding of {padding} have no window of {kernel}");
        return invalid("the input of a pool", reason);
    };
    let mut count = if ceil_mode { rest.div_ceil(stride) } else { rest / stride } + 1;
    // The last window must begin in the input or the padding before it.
    if (count - 1) * stride >= size + padding {
        count -= 1;
    }
    Ok(Windows { count, size, kernel, stride, padding })
}
