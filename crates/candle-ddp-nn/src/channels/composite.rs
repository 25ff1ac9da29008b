//! The same operations made of candle's, as a reference for tests.
use super::extents::Extents;
use candle_core::{Result, Tensor};
use candle_ddp_tensor::accumulator;

pub(super) fn moments_composite(x: &Tensor, centred: bool) -> Result<Tensor> {
    let extents = Extents::of(x.dims());
    if x.elem_count() == 0 {
        return Tensor::zeros((2, extents.channels), accumulator(x.dtype()), x.device());
    }
    let x = x.detach().to_dtype(accumulator(x.dtype()))?.reshape(extents.shape())?;
    let scale = 1.0 / (extents.samples * extents.spatial).max(1) as f64;
    let sum = |x: &Tensor| x.sum_keepdim((0, 2))?.affine(scale, 0.0);
    let mean = if centred { sum(&x)? } else { Tensor::zeros((1, extents.channels, 1), x.dtype(), x.device())? };
    let variance = sum(&x.broadcast_sub(&mean)?.sqr()?)?;
    Tensor::cat(&[mean, variance], 0)?.reshape((2, extents.channels))
}

pub(super) fn gradient_sums_composite(x: &Tensor, dy: &Tensor, mean: &Tensor) -> Result<Tensor> {
    let extents = Extents::of(x.dims());
    if x.elem_count() == 0 {
        return Tensor::zeros((2, extents.channels), mean.dtype(), x.device());
    }
    let wide = |t: &Tensor| t.detach().to_dtype(mean.dtype())?.reshape(extents.shape());
    let (x, dy) = (wide(x)?, wide(dy)?);
    let products = (x.broadcast_sub(&column(mean)?)? * &dy)?;
    Tensor::cat(&[dy.sum_keepdim((0, 2))?, products.sum_keepdim((0, 2))?], 0)?.reshape((2, extents.channels))
}

pub(super) fn normalise_composite(x: &Tensor, [mean, scale, shift]: [&Tensor; 3]) -> Result<Tensor> {
    let wide = x.to_dtype(mean.dtype())?.reshape(Extents::of(x.dims()).shape())?;
    let y = wide.broadcast_sub(&column(mean)?)?.broadcast_mul(&column(scale)?)?.broadcast_add(&column(shift)?)?;
    y.to_dtype(x.dtype())?.reshape(x.shape())
}

pub(super) fn input_gradient_composite(x: &Tensor, dy: &Tensor, [mean, scale, a, b]: [&Tensor; 4]) -> Result<Tensor> {
    let extents = Extents::of(x.dims());
    if x.elem_count() == 0 {
        // Empty, like the gradient of x, with the same shape and dtype.
        return Ok(dy.detach());
    }
    let wide = |t: &Tensor| t.detach().to_dtype(mean.dtype())?.reshape(extents.shape());
    let distance = wide(x)?.broadcast_sub(&column(mean)?)?.broadcast_mul(&column(b)?)?;
    let dx = (wide(dy)?.broadcast_sub(&column(a)?)? - distance)?.broadcast_mul(&column(scale)?)?;
    dx.to_dtype(x.dtype())?.reshape(x.shape())
}

/// One number per channel, to be broadcast over (samples, channels, spatial).
fn column(channels: &Tensor) -> Result<Tensor> {
    channels.reshape((1, channels.elem_count(), 1))
}
