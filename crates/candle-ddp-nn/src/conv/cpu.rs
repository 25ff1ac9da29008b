//! Convolutions on the CPU: of bf16 by the processor's own instructions if they are faster, otherwise by Winograd's algorithm where
//! that is faster, otherwise as products of matrices.
use super::geometry::Geometry;
use super::{direct, products, winograd};
use crate::gemm::bf16::Avx512;
use crate::gemm::{same, unit, wide};
use candle_core::Result;
use candle_ddp_tensor::Element;
use candle_ddp_tensor::borrow::narrow_vec;
use std::any::Any;

/// The result of `run` by this processor's instructions for `T`, if there are any. Depthwise convolutions are no products.
fn natively<T: Element, N: 'static, R: 'static>(
    geometry: &Geometry,
    run: impl FnOnce(Avx512) -> Option<Result<Vec<N>>>,
) -> Option<Result<Vec<R>>> {
    let unit = match unit::<T>() {
        Ok(unit) => unit.filter(|_| !geometry.is_depthwise())?,
        Err(error) => return Some(Err(error)),
    };
    let values: Result<Box<dyn Any>> = run(unit)?.map(|values| Box::new(values) as _);
    values.map(|values| values.downcast().ok().map(|values| *values)).transpose()
}

/// y of shape (n, co, output), from x of shape (n, ci, input) and weights of shape (co, ci / groups, kernel).
pub(super) fn forward<T: Element>(
    geometry: &Geometry,
    x: &[T],
    weight: &[T],
    bias: Option<&[T::Real]>,
) -> Result<Vec<T>> {
    let native = natively::<T, _, _>(geometry, |unit| {
        Some(direct::forward(unit, geometry, same(x)?, same(weight)?, bias.and_then(same)))
    });
    if let Some(y) = native {
        return y;
    }
    match winograd::kind(geometry) {
        Some(kind) => winograd::forward(kind, geometry, x, &wide(weight), bias),
        None => products::forward(geometry, x, weight, bias),
    }
}

/// The gradient of x, of shape (n, ci, input), from the gradient of y.
///
/// For transposed convolutions, whose forward pass this is, a bias is added.
pub(super) fn backward_data<T: Element>(
    geometry: &Geometry,
    dy: &[T],
    weight: &[T],
    bias: Option<&[T::Real]>,
) -> Result<Vec<T>> {
    let native = natively::<T, _, _>(geometry, |unit| {
        Some(direct::backward_data(unit, geometry, same(dy)?, same(weight)?, bias.and_then(same)))
    });
    if let Some(dx) = native {
        return dx;
    }
    if let Some(kind) = winograd::kind(geometry) {
        return winograd::backward_data(kind, geometry, dy, &wide(weight), bias);
    }
    let mut dx = products::backward_data::<T>(geometry, dy, weight)?;
    if let Some(bias) = bias {
        let planes = dx.chunks_exact_mut(geometry.input_pixels().max(1));
        for (plane, bias) in planes.zip(bias.iter().cycle()) {
            plane.iter_mut().for_each(|value| *value += *bias);
        }
    }
    Ok(narrow_vec::<T>(dx))
}

/// The gradient of the weights from x and the gradient of y.
pub(super) fn backward_filter<T: Element>(geometry: &Geometry, x: &[T], dy: &[T]) -> Result<Vec<T::Real>> {
    let native =
        natively::<T, _, _>(geometry, |unit| Some(direct::backward_filter(unit, geometry, same(x)?, same(dy)?)));
    if let Some(sums) = native {
        return sums;
    }
    match winograd::kind(geometry) {
        Some(kind) => winograd::backward_filter(kind, geometry, x, dy),
        None => products::backward_filter(geometry, x, dy),
    }
}
