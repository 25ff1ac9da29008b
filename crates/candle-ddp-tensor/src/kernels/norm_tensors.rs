//! Normalising the rows of candle's tensors.
use super::address::{input, output};
use super::gpu::Gpu;
use super::layer::Output;
use super::norm::{Backward, Forward, Rows, backward, forward};
use super::operands::{AddedNorm, NormOperands};
use super::temporary::Temporary;
use crate::Result;
use crate::sum::sum;
use candle_core::{Shape, Storage, Tensor};
use cudarc::driver::CudaSlice;

/// The statistics that the forward pass keeps for the backward pass; `None` if there were no rows.
#[derive(Debug)]
pub struct NormStatistics(Option<CudaSlice<f64>>);

/// Computes (x − mean) / √(variance + eps) × weight + bias for each row. Without `centred`, the mean counts as zero.
pub fn norm_forward(of: NormOperands) -> Result<((Storage, Shape), NormStatistics)> {
    let y = Output::new(of.x.device().as_cuda_device()?, of.x.dtype(), of.x.shape())?;
    let statistics = run(of, &y, None)?;
    Ok((y.into_result(), NormStatistics(statistics)))
}

/// The same for the sum of x and `residual`, a tensor like x; also returns the sum. `None` if that needs two kernels.
pub fn add_norm_forward(of: NormOperands, residual: &Tensor) -> Result<Option<AddedNorm<NormStatistics>>> {
    let output = || Output::new(of.x.device().as_cuda_device()?, of.x.dtype(), of.x.shape());
    let (y, sum) = (output()?, output()?);
    let Some(statistics) = run(of, &y, Some((residual, &sum)))? else { return Ok(None) };
    Ok(Some(AddedNorm {
        sum: sum.into_result(),
        normed: y.into_result(),
        statistics: NormStatistics(Some(statistics)),
    }))
}

fn run(of: NormOperands, y: &Output, residual: Option<(&Tensor, &Output)>) -> Result<Option<CudaSlice<f64>>> {
    let NormOperands { x, weight, bias, eps, centred } = of;
    let rows = rows(x, weight, eps, centred);
    if rows.rows == 0 {
        return Ok(None);
    }
    let addresses = Forward {
        x: input(x)?,
        weight: input(weight)?,
        bias: bias.map_or(Ok(0), input)?,
        y: y.address()?.0,
        residual: residual
            .map(|(residual, sum)| Ok::<_, crate::Error>([input(residual)?, sum.address()?.0]))
            .transpose()?,
    };
    forward(&Gpu(x.device().as_cuda_device()?), rows, addresses)
}

/// Computes the gradients of x, weight and bias. `x` and `dy` must be contiguous. The gradient of x is added to an `earlier` one, a
/// contiguous tensor like x.
pub fn norm_backward(
    of: NormOperands,
    dy: &Tensor,
    statistics: &NormStatistics,
    earlier: Option<&Tensor>,
) -> Result<(Tensor, Tensor, Tensor)> {
    let NormOperands { x, weight, eps, centred, .. } = of;
    let Some(statistics) = &statistics.0 else {
        return Ok((x.zeros_like()?, weight.zeros_like()?, weight.zeros_like()?));
    };
    let device = x.device().as_cuda_device()?;
    let dx = Output::new(device, x.dtype(), x.shape())?;
    let both = Output::new(device, weight.dtype(), (2, weight.elem_count()))?.into_tensor();
    let (d_weight, d_bias) = (both.get(0)?, both.get(1)?);
    let rows = rows(x, weight, eps, centred);
    let is_alike = |other: &&Tensor| other.dtype() == x.dtype() && other.shape() == x.shape();
    let sums = Temporary::new(device, crate::accumulator(x.dtype()), rows.sums())?;
    let addresses = Backward {
        x: input(x)?,
        weight: input(weight)?,
        dy: input(dy)?,
        dx: dx.address()?.0,
        d_weight: output(&d_weight)?,
        d_bias: output(&d_bias)?,
        sums: sums.address()?.0,
        earlier: earlier.filter(is_alike).map_or(Ok(0), input)?,
    };
    let is_added = backward(&Gpu(device), rows, statistics, addresses)?;
    let dx = match earlier {
        Some(earlier) if !is_added => sum(earlier, &dx.into_tensor())?,
        _ => dx.into_tensor(),
    };
    Ok((dx, d_weight, d_bias))
}

fn rows(x: &Tensor, weight: &Tensor, eps: f64, centred: bool) -> Rows {
    let (dtype, size) = (x.dtype(), weight.elem_count());
    Rows { dtype, rows: x.elem_count() / size.max(1), size, eps, centred, is_narrow: dtype == weight.dtype() }
}
