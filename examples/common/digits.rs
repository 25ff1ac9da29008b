//! The handwritten digits as pictures, of which the programs for images make their small data sets.
use candle_core::{Device, Result};

const SIDE: usize = 8;

/// One of this many digits is for testing.
pub(crate) const TEST_EVERY: usize = 6;

/// A digit from 0 to 9 with its picture, in which 255 is ink.
pub(crate) struct Digit {
    pub(crate) label: u8,
    ink: Vec<u8>,
}

/// Returns all digits. They are compiled into the program; see `examples/data/README.md`.
pub(crate) fn digits() -> Result<Vec<Digit>> {
    let file = include_bytes!("../data/digits.safetensors");
    let tensors = candle_core::safetensors::load_buffer(file, &Device::Cpu)?;
    let (images, labels) = (tensors["images"].to_vec2::<u8>()?, tensors["labels"].to_vec1::<u8>()?);
    let ink = |image: Vec<u8>| image.into_iter().map(|value| (u16::from(value) * 255 / 16) as u8).collect();
    Ok(images.into_iter().zip(labels).map(|(image, label)| Digit { label, ink: ink(image) }).collect())
}

impl Digit {
    /// Returns the picture, row by row, with each pixel `scale` times as high and as wide.
    pub(crate) fn enlarged(&self, scale: usize) -> Vec<u8> {
        let side = SIDE * scale;
        (0..side * side).map(|pixel| self.ink[pixel / side / scale * SIDE + pixel % side / scale]).collect()
    }
}
