//! Convolutions by cuDNN, where the feature `cudnn` is on.
use super::launches::{Address, ConvShape, Convolve};
use crate::Result;
use candle_core::{CudaDevice, DType};
#[cfg(feature = "cudnn")]
use candle_ddp_env::PROCESS;
#[cfg(feature = "cudnn")]
use std::sync::LazyLock;

/// The environment variable that switches cuDNN off with the value 0, as `torch.backends.cudnn.enabled = False` does.
#[cfg(feature = "cudnn")]
const VARIABLE: &str = "CANDLE_DDP_CUDNN";

/// Whether cuDNN is not switched off.
#[cfg(feature = "cudnn")]
pub(super) fn is_enabled() -> Result<bool> {
    static ENABLED: LazyLock<candle_ddp_env::Result<Option<bool>>> = LazyLock::new(|| PROCESS.switch(VARIABLE));
    Ok(ENABLED.clone()?.unwrap_or(true))
}

/// Whether cuDNN is there, and not switched off.
pub fn has_cudnn() -> Result<bool> {
    #[cfg(feature = "cudnn")]
    return is_enabled();
    #[cfg(not(feature = "cudnn"))]
    Ok(false)
}

/// Whether [`convolve`] would enqueue this convolution.
#[cfg_attr(not(feature = "cudnn"), allow(unused_variables))]
pub fn can_convolve(device: &CudaDevice, kind: (Convolve, DType), shape: &ConvShape) -> Result<bool> {
    #[cfg(feature = "cudnn")]
    if is_enabled()? {
        return super::cudnn::can_convolve(device, kind, shape);
    }
    Ok(false)
}

/// Enqueues a convolution of contiguous tensors x, w and y, or ones in the shape's memory format, after all work that candle has enqueued
/// on `device`; the result may be added to what is there (`accumulate`). Returns false, and does nothing, in builds without cuDNN, where it
/// is switched off, and for what cuDNN does not offer.
#[cfg_attr(not(feature = "cudnn"), allow(unused_variables))]
pub fn convolve(
    device: &CudaDevice,
    kind: (Convolve, DType),
    shape: &ConvShape,
    tensors: [Address; 3],
    accumulate: bool,
) -> Result<bool> {
    #[cfg(feature = "cudnn")]
    if is_enabled()? {
        return super::cudnn::convolve(device, kind, shape, tensors, accumulate);
    }
    Ok(false)
}
