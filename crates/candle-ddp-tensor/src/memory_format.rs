//! The order of a tensor's elements in memory.
use candle_core::{Result, Shape, Tensor};

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

    /// The view that [`stored`](Self::stored) is undone by.
    #[doc(hidden)]
    pub fn view(self, stored: &Tensor) -> Result<Tensor> {
        match self {
            Self::Contiguous => Ok(stored.clone()),
            Self::ChannelsLast => stored.permute((0, 3, 1, 2)),
        }
    }

    /// The shape of [`stored`](Self::stored), of images of the shape `shape`.
    #[doc(hidden)]
    pub fn stored_shape(self, shape: &Shape) -> Shape {
        match (self, shape.dims()) {
            (Self::ChannelsLast, &[n, channels, height, width]) => Shape::from((n, height, width, channels)),
            _ => shape.clone(),
        }
    }
}
