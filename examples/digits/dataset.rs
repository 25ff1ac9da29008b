//! The handwritten digits, which are compiled into the program; see `examples/data/README.md`.
use candle_core::{DType, Device, Result, Tensor};

/// One of this many images is used for testing.
const TEST_EVERY: usize = 5;

/// Images with their labels.
pub(crate) struct Dataset {
    images: Tensor,
    labels: Tensor,
}

impl Dataset {
    /// Returns the digits for training and those for testing: four out of five images, and the rest.
    pub(crate) fn digits(device: &Device) -> Result<(Self, Self)> {
        let file = include_bytes!("../data/digits.safetensors");
        let tensors = candle_core::safetensors::load_buffer(file, &Device::Cpu)?;
        let (images, labels) = (&tensors["images"], &tensors["labels"]);
        let len = labels.elem_count();
        let images = (images.to_dtype(DType::F32)? / 16.)?.reshape((len, 1, 8, 8))?.to_device(device)?;
        let labels = labels.to_dtype(DType::U32)?.to_device(device)?;
        let whole = Self { images, labels };
        let (test, train): (Vec<usize>, Vec<usize>) = (0..len).partition(|index| index % TEST_EVERY == 0);
        let part = |indices: &[usize]| whole.batch(indices).map(|(images, labels)| Self { images, labels });
        Ok((part(&train)?, part(&test)?))
    }

    /// Returns the number of images.
    pub(crate) fn len(&self) -> usize {
        self.labels.elem_count()
    }

    /// Returns the images f32[B, 1, 8, 8], from 0 to 1, and labels u32[B] at the given indices.
    pub(crate) fn batch(&self, indices: &[usize]) -> Result<(Tensor, Tensor)> {
        let indices: Vec<u32> = indices.iter().map(|&index| index as u32).collect();
        let indices = Tensor::new(indices, self.labels.device())?;
        Ok((self.images.index_select(&indices, 0)?, self.labels.index_select(&indices, 0)?))
    }
}
