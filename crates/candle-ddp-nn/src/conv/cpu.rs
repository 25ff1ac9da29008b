//! Convolutions on the CPU: by Winograd's algorithm where that is faster, otherwise as products of matrices. Winograd's sums are
//! always products of f32 (f64 for f64): transformed factors would not stay within the rounding of bf16.
use super::geometry::Geometry;
use super::{products, winograd};
use crate::gemm::{is_native, wide};
use candle_core::Result;
use candle_ddp_tensor::Element;
use candle_ddp_tensor::borrow::narrow_vec;

fn winograd_kind<T: Element>(geometry: &Geometry) -> Option<winograd::Kind> {
    // Instructions for bf16 are twice as fast as those for f32. Tiles of 4×4 save more than that, tiles of 2×2 do not.
    winograd::kind(geometry).filter(|kind| *kind == winograd::Kind::Four || !is_native::<T>())
}

/// y of shape (n, co, output), from x of shape (n, ci, input) and weights of shape (co, ci / groups, kernel).
pub(super) fn forward<T: Element>(
    geometry: &Geometry,
    x: &[T],
    weight: &[T],
    bias: Option<&[T::Real]>,
) -> Result<Vec<T>> {
    match winograd_kind::<T>(geometry) {
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
    if let Some(kind) = winograd_kind::<T>(geometry) {
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
    match winograd_kind::<T>(geometry) {
        Some(kind) => winograd::backward_filter(kind, geometry, x, dy),
        None => products::backward_filter(geometry, x, dy),
    }
}
