//! `RandomHorizontalFlip`.
use super::Transform;
use crate::Error;
use crate::{Image, Mask};
use candle_core::Result;
use candle_ddp_tensor::seed::Generator;

/// Mirrors images at random, left to right: torchvision's `RandomHorizontalFlip`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RandomHorizontalFlip {
    /// The probability. Default: 0.5.
    pub p: f64,
}

impl Default for RandomHorizontalFlip {
    fn default() -> Self {
        Self { p: 0.5 }
    }
}

impl Transform for RandomHorizontalFlip {
    fn apply(&self, image: &mut Image, mask: Option<&mut Mask>, random: &mut Generator) -> Result<()> {
        if !(0. ..=1.).contains(&self.p) {
            return Err(Error::invalid("p", format!("the probability {} must be from 0 to 1", self.p)).into());
        }
        if random.uniform(0., 1.) >= self.p {
            return Ok(());
        }
        let width = image.width();
        for row in image.pixels_mut().chunks_exact_mut(width * 3) {
            row.as_chunks_mut::<3>().0.reverse();
        }
        if let Some(mask) = mask {
            mask.labels_mut().chunks_exact_mut(width).for_each(<[u8]>::reverse);
        }
        Ok(())
    }
}
