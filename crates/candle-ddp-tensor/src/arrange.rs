//! Bringing tensors into a memory format.
use crate::copy::snapshot_tensor;
use crate::kernels::{self, Address, Grid, Kernel, Launch, Output};
use crate::memory_format::MemoryFormat;
use candle_core::{DType, Device, Result, Shape, Storage, Tensor};

#[doc(hidden)]
impl MemoryFormat {
    /// The contiguous tensor with the same elements in this format's order: (N, H, W, C) for channels last, a view if `x` has the
    /// format. `x` has no graph, unless it has the format.
    pub fn stored(self, x: &Tensor) -> Result<Tensor> {
        let view = self.order(x)?;
        match self.transposed(x, &view)? {
            _ if view.is_contiguous() => Ok(view),
            Some(stored) => Ok(stored.into_tensor()),
            None => view.contiguous(),
        }
    }

    /// A copy of what is [`stored`](Self::stored).
    pub fn snapshot(self, x: &Tensor) -> Result<(Storage, Shape)> {
        let view = self.order(x)?;
        match self.transposed(x, &view)? {
            Some(stored) => Ok(stored.into_result()),
            None => snapshot_tensor(&view, x.dtype()),
        }
    }

    /// The view of `x` whose dimensions are in this format's order.
    fn order(self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Contiguous => Ok(x.clone()),
            Self::ChannelsLast => x.permute((0, 2, 3, 1)),
        }
    }

    /// A copy of `view`, the [`order`](Self::order) of `x`, by a kernel, for images on a GPU that are in the other format.
    fn transposed(self, x: &Tensor, view: &Tensor) -> Result<Option<Output>> {
        let (Device::Cuda(device), &[n, channels, height, width]) = (x.device(), x.dims()) else { return Ok(None) };
        let dtype = x.dtype();
        let (from, [rows, columns]) = match self {
            _ if view.is_contiguous() || !kernels::take(x.device(), dtype) || x.track_op() => return Ok(None),
            Self::ChannelsLast if x.is_contiguous() => (x.clone(), [channels, height * width]),
            Self::Contiguous if Self::of(x) == Self::ChannelsLast => {
                (x.permute((0, 2, 3, 1))?, [height * width, channels])
            }
            _ => return Ok(None),
        };
        let to = Output::new(device, dtype, view.shape())?;
        let tensors = &[kernels::address(&from)?, to.address()?];
        let vector = Address::vector(&tensors[1..], rows, dtype);
        let (grid, numbers) = (Grid::Threads(x.elem_count() / vector), &[n, rows, columns, vector]);
        kernels::launch(device, Launch { kernel: Kernel::Transpose, dtype, grid, tensors, numbers, reals: &[] })?;
        Ok(Some(to))
    }

    /// The tensor in this format: itself if it has it already.
    pub(crate) fn arrange(self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::ChannelsLast if Self::of(x) == self => Ok(x.clone()),
            _ => self.view(&self.stored(x)?),
        }
    }

    /// `x` in another dtype, and in this format. candle's result would be contiguous.
    pub fn to_dtype(self, x: &Tensor, dtype: DType) -> Result<Tensor> {
        match self {
            Self::Contiguous => x.to_dtype(dtype),
            Self::ChannelsLast => self.view(&self.stored(x)?.to_dtype(dtype)?),
        }
    }

    /// The view that [`stored`](Self::stored) is undone by.
    pub fn view(self, stored: &Tensor) -> Result<Tensor> {
        match self {
            Self::Contiguous => Ok(stored.clone()),
            Self::ChannelsLast => stored.permute((0, 3, 1, 2)),
        }
    }

    /// The shape of [`stored`](Self::stored), of images of the shape `shape`.
    pub fn stored_shape(self, shape: &Shape) -> Shape {
        match (self, shape.dims()) {
            (Self::ChannelsLast, &[n, channels, height, width]) => Shape::from((n, height, width, channels)),
            _ => shape.clone(),
        }
    }
}
