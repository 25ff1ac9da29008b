//! `ColorJitter`.
use super::Transform;
use super::hsv;
use crate::Error;
use crate::{Image, Mask};
use candle_core::Result;
use candle_ddp_tensor::seed::Generator;

/// Changes brightness, contrast, saturation and hue by random amounts, one after the other in random order: torchvision's
/// `ColorJitter`. Masks stay as they are.
///
/// As in torchvision, the default changes nothing.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ColorJitter {
    /// The brightness is multiplied by a number from `max(0, 1 - brightness)` to `1 + brightness`. Default: 0.
    pub brightness: f64,
    /// The distance from the mean grey is multiplied by a number from `max(0, 1 - contrast)` to `1 + contrast`. Default: 0.
    pub contrast: f64,
    /// The distance from each pixel's grey is multiplied by a number from `max(0, 1 - saturation)` to `1 + saturation`.
    /// Default: 0.
    pub saturation: f64,
    /// The hue is turned by a number from `-hue` to `hue`, where 1 is all the way round; at most 0.5. Default: 0.
    pub hue: f64,
}

impl Transform for ColorJitter {
    fn apply(&self, image: &mut Image, _: Option<&mut Mask>, random: &mut Generator) -> Result<()> {
        let amounts = [self.brightness, self.contrast, self.saturation, self.hue];
        for (name, amount) in ["brightness", "contrast", "saturation", "hue"].into_iter().zip(amounts) {
            let most = if name == "hue" { 0.5 } else { f64::MAX };
            if !(0. ..=most).contains(&amount) {
                let bounds = if name == "hue" { "from 0 to 0.5" } else { "a number that is not negative" };
                return Err(Error::invalid(name, format!("{amount} must be {bounds}")).into());
            }
        }
        // As torch.randperm; the factors follow it.
        let mut order = [0, 1, 2, 3];
        for i in 0..3 {
            order.swap(i, i + random.below(4 - i as u64) as usize);
        }
        let factors: [Option<f64>; 4] = std::array::from_fn(|which| {
            let amount = amounts[which];
            let low = if which == 3 { -amount } else { (1. - amount).max(0.) };
            let high = if which == 3 { amount } else { 1. + amount };
            (amount > 0.).then(|| random.uniform(low, high))
        });
        let pixels = image.pixels_mut();
        for which in order {
            match (which, factors[which]) {
                (0, Some(factor)) => blend(pixels, 0, factor as f32),
                (1, Some(factor)) => blend(pixels, mean_grey(pixels), factor as f32),
                (2, Some(factor)) => saturate(pixels, factor as f32),
                (_, Some(turn)) => hsv::turn_hue(pixels, turn),
                (_, None) => {}
            }
        }
        Ok(())
    }
}

/// Pillow's `Image.blend` of a grey image and this one.
fn blend(pixels: &mut [u8], grey: u8, factor: f32) {
    let table: [u8; 256] = std::array::from_fn(|byte| mix(grey, byte as u8, factor));
    pixels.iter_mut().for_each(|byte| *byte = table[usize::from(*byte)]);
}

fn saturate(pixels: &mut [u8], factor: f32) {
    for pixel in pixels.as_chunks_mut::<3>().0 {
        let grey = grey(pixel);
        *pixel = pixel.map(|byte| mix(grey, byte, factor));
    }
}

/// Between `from` at factor 0 and `to` at factor 1, rounded down, as in Pillow.
fn mix(from: u8, to: u8, factor: f32) -> u8 {
    // The cast ends at 0 and 255, as Pillow does.
    (f32::from(from) + factor * (f32::from(to) - f32::from(from))) as u8
}

/// Pillow's conversion to grey ("L"), of ITU-R 601-2.
fn grey(&[red, green, blue]: &[u8; 3]) -> u8 {
    ((u32::from(red) * 19595 + u32::from(green) * 38470 + u32::from(blue) * 7471 + 0x8000) >> 16) as u8
}

fn mean_grey(pixels: &[u8]) -> u8 {
    let (pixels, _) = pixels.as_chunks::<3>();
    let sum: u64 = pixels.iter().map(|pixel| u64::from(grey(pixel))).sum();
    (sum as f64 / pixels.len() as f64 + 0.5) as u8
}
