//! Attention by cuDNN, where the feature `cudnn` is on.
use super::launches::{AttendShape, AttendTensors};
#[cfg(feature = "cudnn")]
use crate::Error;
use crate::Result;
use candle_core::{CudaDevice, DType};
#[cfg(feature = "cudnn")]
use candle_ddp_env::PROCESS;
#[cfg(feature = "cudnn")]
use std::sync::LazyLock;

/// The environment variable that switches attention by cuDNN off with the value 0, and lets it add up gradients in any order with `fast`.
#[cfg(feature = "cudnn")]
const VARIABLE: &str = "CANDLE_DDP_CUDNN_ATTENTION";

#[cfg(feature = "cudnn")]
fn choice() -> Result<Option<&'static str>> {
    static CHOICE: LazyLock<candle_ddp_env::Result<Option<&'static str>>> = LazyLock::new(|| PROCESS.choice(VARIABLE));
    Ok(CHOICE.clone()?)
}

/// Whether the gradients of attention by cuDNN may be sums that are made by atomic operations, so that they differ between runs.
pub fn is_attention_fast() -> Result<bool> {
    #[cfg(feature = "cudnn")]
    return Ok(choice()? == Some("fast"));
    #[cfg(not(feature = "cudnn"))]
    Ok(false)
}

/// Whether cuDNN may have something for this: false in builds without it, where it is switched off, and for what it never has.
#[cfg_attr(not(feature = "cudnn"), allow(unused_variables))]
pub fn may_attend(dtype: DType, shape: &AttendShape) -> Result<bool> {
    #[cfg(feature = "cudnn")]
    {
        let is_enabled = super::convolve::is_enabled()? && choice()? != Some("0");
        // cuDNN's kernels load 16 bytes of a row at once.
        let is_narrow = matches!(dtype, DType::F16 | DType::BF16);
        Ok(is_enabled && is_narrow && [shape.size, shape.value_size].iter().all(|size| size.is_multiple_of(8)))
    }
    #[cfg(not(feature = "cudnn"))]
    Ok(false)
}

/// Enqueues attention, or its backward pass, after all work that candle has enqueued on `device`. Returns false, and does
/// nothing, where `may_attend` is false, and for what cuDNN does not offer.
#[cfg_attr(not(feature = "cudnn"), allow(unused_variables))]
pub fn attend(
    device: &CudaDevice,
    dtype: DType,
    shape: &AttendShape,
    scale: f64,
    tensors: &AttendTensors,
) -> Result<bool> {
    #[cfg(feature = "cudnn")]
    if may_attend(dtype, shape)? {
        let AttendTensors { qkv: [q, k, v], y, backward, .. } = *tensors;
        let gradients = backward.iter().flat_map(|(dy, [dq, dk, dv])| [dy, dq, dk, dv]).copied();
        if [q, k, v, y].into_iter().chain(gradients).all(|address| address.is_aligned()) {
            let is_fast = is_attention_fast()?;
            return super::cudnn::attend(device, dtype, shape, scale, tensors, is_fast).map_err(with_remedy);
        }
    }
    Ok(false)
}

#[cfg(feature = "cudnn")]
fn with_remedy(error: Error) -> Error {
    match error {
        Error::Kernel { file, operation, reason } => Error::Kernel {
            file,
            operation: format!("{operation} for attention"),
            reason: format!("{reason}; with {VARIABLE}=0, attention runs without cuDNN"),
        },
        error => error,
    }
}

#[cfg(all(test, feature = "cudnn"))]
mod tests {
    use super::*;

    #[test]
    fn errors_of_cudnn_name_the_remedy() {
        let (operation, reason) = ("finalizing a graph".to_string(), "INTERNAL_ERROR".to_string());
        let error = with_remedy(Error::Kernel { file: "cuDNN", operation, reason }).to_string();
        for part in ["cuDNN: finalizing a graph for attention", "INTERNAL_ERROR", "CANDLE_DDP_CUDNN_ATTENTION=0"] {
            assert!(error.contains(part), "{error}");
        }
    }
}
