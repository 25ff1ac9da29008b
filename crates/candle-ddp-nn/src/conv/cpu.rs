//! Convolutions on the CPU: by Winograd's algorithm where that is faster, otherwise as products of matrices. Factors in bf16 are
//! never transformed: sums of them would not stay within its rounding.
use super::geometry::Geometry;
use super::{products, winograd};
use crate::gemm::is_native;
use candle_core::Result;
use candle_ddp_tensor::Element;
use candle_ddp_tensor::borrow::narrow_vec;

fn winograd_kind<T: Element>(geometry: &Geometry) -> Option<winograd::Kind> {
    if is_native::<T>() { None } else { winograd::kind(geometry) }
}

/// y of shape (n, co, output), from x of shape (n, ci, input) and weights of shape (co, ci / groups, kernel).
pub(super) fn forward<T: Element>(
    geometry: &Geometry,
    x: &[T],
    weight: &[T::Real],
    bias: Option<&[T::Real]>,
) -> Result<Vec<T>> {
    match winograd_kind::<T>(geometry) {
        Some(kind) => winograd::forward(kind, geometry, x, weight, bias),
        None => products::forward(geometry, x, weight, bias),
    }
}

/// The gradient of x, of shape (n, ci, input), from the gradient of y.
///
/// For transposed convolutions, whose forward pass this is, a bias is added.
pub(super) fn backward_data<T: Element>(
    geometry: &Geometry,
    dy: &[T],
    weight: &[T::Real],
    bias: Option<&[T::Real]>,
) -> Result<Vec<T>> {
    if let Some(kind) = winograd_kind::<T>(geometry) {
        return winograd::backward_data(kind, geometry, dy, weight, bias);
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
    match winograd_kind::<T>(geometry) {
        Some(kind) => winograd::backward_filter(kind, geometry, x, dy),
        None => products::backward_filter(geometry, x, dy),
    }
}
