//! Changing the memory format of a tensor.
use candle_core::{Result, Tensor};
use candle_ddp_tensor::error::describe;
use candle_ddp_tensor::function::{Function, apply_in, argument};
use candle_ddp_tensor::{Error, MemoryFormat};

/// `x` in the memory format `format`: `torch.Tensor.to(memory_format=…)`. The shape stays the same, and `x` is copied only if it has
/// another format. The gradient passes unchanged.
///
/// With images (N, C, H, W) in [`MemoryFormat::ChannelsLast`], convolutions by cuDNN need no conversions, and are much faster in f16,
/// bf16 and TF32. Convert the images alone: on CUDA with the feature `cudnn`, [`Conv2d`](crate::Conv2d),
/// [`ConvTranspose2d`](crate::ConvTranspose2d), [`BatchNorm`](crate::BatchNorm), pooling, [`add`](crate::add()) and the activation
/// functions keep the format in their results, and in gradients. Elsewhere, and in candle's own operations, results are contiguous;
/// all of them are the same numbers in both formats, except for the order in which they are added. Parameters stay contiguous.
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # fn main() -> candle_core::Result<()> {
/// use candle_ddp_nn::{MemoryFormat, to_memory_format};
/// let images = Tensor::zeros((2, 3, 8, 8), DType::F32, &Device::Cpu)?;
/// let images = to_memory_format(&images, MemoryFormat::ChannelsLast)?;
/// assert_eq!((images.dims(), images.stride()), (&[2, 3, 8, 8][..], &[192, 1, 24, 3][..]));
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// Returns an error for [`MemoryFormat::ChannelsLast`] and a tensor that does not have four dimensions, and the device's errors.
pub fn to_memory_format(x: &Tensor, format: MemoryFormat) -> Result<Tensor> {
    if format == MemoryFormat::ChannelsLast && x.rank() != 4 {
        let is = describe(x.dtype(), x.shape());
        return Err(Error::invalid("the tensor in channels_last", format!("it must be (N, C, H, W), not {is}")).into());
    }
    let has_it = match (format, x.dims()) {
        // The formats agree.
        (MemoryFormat::Contiguous, _) | (_, [_, _, 1, 1]) => x.is_contiguous(),
        _ => MemoryFormat::of(x) == format || x.elem_count() == 0,
    };
    if has_it {
        return Ok(argument(x));
    }
    apply_in(format, &[x], format.snapshot(&x.detach())?, ToMemoryFormat)
}

struct ToMemoryFormat;

impl Function for ToMemoryFormat {
    fn name(&self) -> &'static str {
        "to_memory_format"
    }

    fn backward(&self, gradient: &Tensor, _: &[bool]) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(gradient.clone())])
    }
}
