//! Batches of samples of common types.
use candle_ddp_state::Result;
#[doc(inline)]
pub use candle_ddp_tensor::collate::Collate;

/// Makes a batch of samples, as PyTorch's `default_collate` does: tensors are stacked, numbers become a tensor, and a tuple the
/// tuple of its batches. [`Collate`] lists the types.
///
/// Other types of the program can implement [`Collate`], or the loader is given another function.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_ddp::data::default_collate;
///
/// let image = Tensor::zeros((3, 32, 32), DType::F32, &Device::Cpu)?;
/// let (images, labels) = default_collate(vec![(image.clone(), 7u32), (image, 3)])?;
/// assert_eq!(images.dims(), [2, 3, 32, 32]);
/// assert_eq!(labels.to_vec1::<u32>()?, [7, 3]);
/// # Ok::<(), candle_ddp::Error>(())
/// ```
///
/// # Errors
/// candle's, of samples that differ in shape, dtype or device, and of no samples at all.
pub fn default_collate<S: Collate>(samples: Vec<S>) -> Result<S::Batch> {
    Ok(S::collate(samples)?)
}
