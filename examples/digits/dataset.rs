//! The handwritten digits, which are compiled into the program; see `examples/data/README.md`.
use candle_core::{DType, Device, Tensor};
use candle_ddp::Result;
use candle_ddp::data::TensorDataset;

/// One of this many images is used for testing.
const TEST_EVERY: u32 = 5;

/// Images f32\[B, 1, 8, 8\], from 0 to 1, with their labels u32\[B\].
pub(crate) type Digits = TensorDataset<(Tensor, Tensor)>;

/// Returns the digits for training and those for testing: four out of five images, and the rest.
pub(crate) fn digits(device: &Device) -> Result<(Digits, Digits)> {
    let file = include_bytes!("../data/digits.safetensors");
    let tensors = candle_core::safetensors::load_buffer(file, &Device::Cpu)?;
    let (images, labels) = (&tensors["images"], &tensors["labels"]);
    let len = labels.elem_count();
    let images = (images.to_dtype(DType::F32)? / 16.)?.reshape((len, 1, 8, 8))?.to_device(device)?;
    let labels = labels.to_dtype(DType::U32)?.to_device(device)?;
    let (test, train): (Vec<u32>, Vec<u32>) = (0..len as u32).partition(|index| index % TEST_EVERY == 0);
    let part = |indices: Vec<u32>| {
        let indices = Tensor::new(indices, device)?;
        TensorDataset::new((images.index_select(&indices, 0)?, labels.index_select(&indices, 0)?))
    };
    Ok((part(train)?, part(test)?))
}
