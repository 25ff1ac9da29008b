//! Conversion of what files hold.
use candle_core::{DType, Tensor};

/// Converts a file's tensor by way of f32, which holds every float8: candle may hang when it converts float8 to f64.
pub(super) fn converted(tensor: &Tensor, dtype: DType) -> candle_core::Result<Tensor> {
    let tensor = if tensor.dtype() == DType::F8E4M3 { tensor.to_dtype(DType::F32)? } else { tensor.clone() };
    tensor.to_dtype(dtype)
}
