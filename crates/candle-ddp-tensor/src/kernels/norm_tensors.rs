//! Normalising the rows of candle's tensors.
use super::address::{input, output, read_address, write_address};
use super::gpu::Gpu;
use super::layer::Output;
use super::norm::{Backward, Forward, Rows, backward, forward};
use super::operands::NormOperands;
use super::temporary::Temporary;
use crate::Result;
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{CudaStorage, DType, Layout, Tensor};
use cudarc::driver::CudaSlice;

/// The statistics that the forward pass keeps for the backward pass; `None` if there were no rows.
#[derive(Debug)]
pub struct NormStatistics(Option<CudaSlice<f64>>);

/// Computes (x − mean) / √(variance + eps) × weight + bias for each row. Without `centred`, the mean counts as zero.
pub fn norm_forward(
    NormOperands { x, weight, bias }: NormOperands,
    eps: f64,
    centred: bool,
) -> Result<(CudaStorage, NormStatistics)> {
    let (device, shape) = (x.0.device(), x.1.shape());
    let dtypes = [x.0.dtype(), weight.0.dtype()];
    let rows = rows(dtypes, shape.elem_count(), weight.1.shape().elem_count(), eps, centred);
    // SAFETY: the kernel writes every element; if it fails, the storage is dropped unread.
    let mut y = unsafe { device.alloc_uninit(shape, x.0.dtype()) }?;
    if rows.rows == 0 {
        return Ok((y, NormStatistics(None)));
    }
    let bias = bias.map_or(Ok(0), |(storage, layout)| read_address(storage, layout))?;
    let y_address = write_address(&mut y, &Layout::contiguous(shape))?;
    let (x, weight) = (read_address(x.0, x.1)?, read_address(weight.0, weight.1)?);
    let statistics = forward(&Gpu(device), rows, Forward { x, weight, bias, y: y_address })?;
    Ok((y, NormStatistics(Some(statistics))))
}

/// Computes the gradients of x, weight and bias. `x` and `dy` must be contiguous.
pub fn norm_backward(
    x: &Tensor,
    weight: &Tensor,
    dy: &Tensor,
    statistics: &NormStatistics,
    centred: bool,
) -> Result<(Tensor, Tensor, Tensor)> {
    let Some(statistics) = &statistics.0 else {
        return Ok((x.zeros_like()?, weight.zeros_like()?, weight.zeros_like()?));
    };
    let device = x.device().as_cuda_device()?;
    let dx = Output::new(device, x.dtype(), x.shape())?;
    let both = Output::new(device, weight.dtype(), (2, weight.elem_count()))?.into_tensor();
    let (d_weight, d_bias) = (both.get(0)?, both.get(1)?);
    let rows = rows([x.dtype(), weight.dtype()], x.elem_count(), weight.elem_count(), 0., centred);
    let sums = Temporary::new(device, crate::accumulator(x.dtype()), rows.sums())?;
    let addresses = Backward {
        x: input(x)?,
        weight: input(weight)?,
        dy: input(dy)?,
        dx: dx.address()?.0,
        d_weight: output(&d_weight)?,
        d_bias: output(&d_bias)?,
        sums: sums.address()?.0,
    };
    backward(&Gpu(device), rows, statistics, addresses)?;
    Ok((dx.into_tensor(), d_weight, d_bias))
}

/// The rows of a tensor, whose dtype and the one of whose weight are given.
fn rows([dtype, of_weight]: [DType; 2], elements: usize, size: usize, eps: f64, centred: bool) -> Rows {
    Rows { dtype, rows: elements / size.max(1), size, eps, centred, is_narrow: dtype == of_weight }
}
