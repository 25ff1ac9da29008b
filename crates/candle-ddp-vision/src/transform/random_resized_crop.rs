//! `RandomResizedCrop`.
use super::resample::resample;
use super::{Area, Transform};
use crate::Error;
use crate::{Image, Mask};
use candle_core::Result;
use candle_ddp_tensor::seed::Generator;

/// Cuts a part of random size, proportions and place out of each image and gives it one size: torchvision's
/// `RandomResizedCrop`, by bilinear interpolation with antialiasing. Masks get the nearest label.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RandomResizedCrop {
    /// The height and width that the part is given. Default: 224 × 224.
    pub size: (usize, usize),
    /// The smallest and the largest share of the image's area that the part has. Default: 0.08 to 1.
    pub scale: (f64, f64),
    /// The smallest and the largest ratio of the part's width to its height. Default: 3/4 to 4/3.
    pub ratio: (f64, f64),
}

impl Default for RandomResizedCrop {
    fn default() -> Self {
        Self { size: (224, 224), scale: (0.08, 1.), ratio: (3. / 4., 4. / 3.) }
    }
}

impl RandomResizedCrop {
    /// Returns the place of the part. The first of ten random parts that fits into the image is taken; if none does, the largest
    /// part in the middle with allowed proportions.
    fn area(&self, height: usize, width: usize, random: &mut Generator) -> Area {
        let (low, high) = (self.ratio.0.ln(), self.ratio.1.ln());
        for _ in 0..10 {
            let area = (height * width) as f64 * random.uniform(self.scale.0, self.scale.1);
            let ratio = random.uniform(low, high).exp();
            // Python rounds halves to even numbers.
            let part_width = (area * ratio).sqrt().round_ties_even() as usize;
            let part_height = (area / ratio).sqrt().round_ties_even() as usize;
            if (1..=width).contains(&part_width) && (1..=height).contains(&part_height) {
                let top = random.below((height - part_height + 1) as u64) as usize;
                let left = random.below((width - part_width + 1) as u64) as usize;
                return Area { top, left, height: part_height, width: part_width };
            }
        }
        let ratio = width as f64 / height as f64;
        let (part_height, part_width) = if ratio < self.ratio.0 {
            ((width as f64 / self.ratio.0).round_ties_even() as usize, width)
        } else if ratio > self.ratio.1 {
            (height, (height as f64 * self.ratio.1).round_ties_even() as usize)
        } else {
            (height, width)
        };
        // Of an image of few pixels, the rounded part could be empty, or larger than the image.
        let (part_height, part_width) = (part_height.clamp(1, height), part_width.clamp(1, width));
        let (top, left) = ((height - part_height) / 2, (width - part_width) / 2);
        Area { top, left, height: part_height, width: part_width }
    }
}

impl Transform for RandomResizedCrop {
    fn apply(&self, image: &mut Image, mask: Option<&mut Mask>, random: &mut Generator) -> Result<()> {
        for (name, (low, high)) in [("scale", self.scale), ("ratio", self.ratio)] {
            if !(0. < low && low <= high && high.is_finite()) {
                let reason = format!("({low}, {high}) must be a positive number and one that is not smaller");
                return Err(Error::invalid(name, reason).into());
            }
        }
        let area = self.area(image.height(), image.width(), random);
        resample(image, mask, area, self.size.0, self.size.1)
    }
}
