//! The order of a tensor's elements in memory.
use candle_core::Tensor;

/// The order of a tensor's elements in memory: `torch.memory_format`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum MemoryFormat {
    /// The last dimension's elements are neighbours: `torch.contiguous_format`. Of images (N, C, H, W), each channel is a plane.
    #[default]
    Contiguous,
    /// Of images (N, C, H, W), the channels of a pixel are neighbours, as in a contiguous tensor (N, H, W, C):
    /// `torch.channels_last`. The shape stays (N, C, H, W); the strides tell.
    ChannelsLast,
}

impl MemoryFormat {
    /// The format of `x`: channels last for images with its strides, and otherwise contiguous, even if `x` is not. A single pixel
    /// counts as contiguous, since the formats agree there, and so does a tensor without elements. Gradients end here: the result is no
    /// tensor.
    pub fn of(x: &Tensor) -> Self {
        match (x.dims(), x.stride()) {
            (&[_, channels, height, width], &[image, 1, row, pixel])
                if x.elem_count() > 0
                    && height * width > 1
                    && pixel == channels
                    && row == width * channels
                    && image == height * row =>
            {
                Self::ChannelsLast
            }
            _ => Self::Contiguous,
        }
    }
}
