//! `Resize` and `RandomResize`.
use super::resample::resample;
use super::{Area, Transform};
use crate::Error;
use crate::{Image, Mask};
use candle_core::Result;
use candle_ddp_tensor::seed::Generator;

/// Gives images another size: torchvision's `Resize`, by bilinear interpolation with antialiasing. Masks get the nearest
/// label.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resize {
    /// To this height and width.
    Exact(usize, usize),
    /// To this length of the shorter side. The longer one follows from the image's proportions, rounded down. Default: 256.
    ShorterSide(usize),
}

impl Default for Resize {
    fn default() -> Self {
        Self::ShorterSide(256)
    }
}

impl Transform for Resize {
    fn apply(&self, image: &mut Image, mask: Option<&mut Mask>, _: &mut Generator) -> Result<()> {
        resize(image, mask, *self)
    }
}

/// Gives the shorter side of each image a random length, and keeps the proportions: torchvision's `RandomResize`, the
/// random scale of segmentation. Masks get the nearest label.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RandomResize {
    /// The smallest length of the shorter side. Default: 256.
    pub min_size: usize,
    /// The largest length plus 1, as in torchvision. Default: 1024.
    pub max_size: usize,
}

impl Default for RandomResize {
    fn default() -> Self {
        Self { min_size: 256, max_size: 1024 }
    }
}

impl Transform for RandomResize {
    fn apply(&self, image: &mut Image, mask: Option<&mut Mask>, random: &mut Generator) -> Result<()> {
        let Self { min_size, max_size } = *self;
        if min_size >= max_size {
            let reason = format!("{max_size} must be greater than min_size, {min_size}");
            return Err(Error::invalid("max_size", reason).into());
        }
        let size = min_size + random.below((max_size - min_size) as u64) as usize;
        resize(image, mask, Resize::ShorterSide(size))
    }
}

fn resize(image: &mut Image, mask: Option<&mut Mask>, size: Resize) -> Result<()> {
    let area = Area { top: 0, left: 0, height: image.height(), width: image.width() };
    let longer = |size: usize, longer: usize, shorter: usize| (size as f64 * longer as f64 / shorter as f64) as usize;
    let (height, width) = match size {
        Resize::Exact(height, width) => (height, width),
        Resize::ShorterSide(size) if area.width <= area.height => (longer(size, area.height, area.width), size),
        Resize::ShorterSide(size) => (size, longer(size, area.width, area.height)),
    };
    resample(image, mask, area, height, width)
}
