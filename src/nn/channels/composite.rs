//! The same with candle's operations, for other devices than the CPU.
use super::extents::{Extents, accumulator};
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::op::{Add, Mul, Sub};
use candle_core::{Layout, Result, Shape, Tensor};

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

/// [`normalise`] with candle's operations, on any device. `channels` are the storages of mean, scale and shift, which
/// are contiguous, and of the dtype `accumulator`.
pub(crate) fn normalise_composite<S>(
    x: &S,
    layout: &Layout,
    [mean, scale, shift]: [(&S, &Layout); 3],
) -> Result<(S, Shape)>
where
    S: BackendStorage<Device: BackendDevice<Storage = S>>,
{
    let extents = Extents::of(layout.dims());
    let (dtype, acc) = (x.dtype(), accumulator(x.dtype()));
    if layout.shape().elem_count() == 0 {
        // Of one element, since on some GPUs an allocation of nothing fails; the tensor takes none of it.
        return Ok((x.device().zeros_impl(&Shape::from(1), dtype)?, layout.shape().clone()));
    }
    let wide = x.to_dtype(layout, acc)?;
    let flat = Layout::contiguous(extents.shape());
    let spread = |layout: &Layout| -> Result<Layout> {
        let column = Layout::new(Shape::from((1, extents.channels, 1)), vec![0, 1, 0], layout.start_offset());
        column.broadcast_as(extents.shape())
    };
    let y = wide.binary_impl::<Sub>(mean.0, &flat, &spread(mean.1)?)?;
    let y = y.binary_impl::<Mul>(scale.0, &flat, &spread(scale.1)?)?;
    let y = y.binary_impl::<Add>(shift.0, &flat, &spread(shift.1)?)?;
    Ok((y.to_dtype(&flat, dtype)?, layout.shape().clone()))
}

pub(super) fn input_gradient_composite(x: &Tensor, dy: &Tensor, [mean, scale, a, b]: [&Tensor; 4]) -> Result<Tensor> {
    let extents = Extents::of(x.dims());
    if x.elem_count() == 0 {
        // As empty as the gradient of x, and of the same shape and dtype.
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
