//! Images of another size, as Pillow makes them.
use super::Area;
use crate::Error;
use crate::image::check_size;
use crate::{Image, Mask, scratch};
use candle_core::Result;
use fast_image_resize::images::{TypedCroppedImage, TypedImage, TypedImageRef};
use fast_image_resize::pixels::U8x3;
use fast_image_resize::{FilterType, ResizeAlg, ResizeOptions};

/// Cuts `area` out of the image and its mask and gives it another size: the image by bilinear interpolation, with
/// antialiasing where it becomes smaller, and the mask by taking the nearest label.
pub(super) fn resample(
    image: &mut Image,
    mask: Option<&mut Mask>,
    area: Area,
    height: usize,
    width: usize,
) -> Result<()> {
    check_size(height, width).map_err(|reason| Error::invalid("size", reason))?;
    let whole = Area { top: 0, left: 0, height: image.height(), width: image.width() };
    if area == whole && (height, width) == (area.height, area.width) {
        return Ok(());
    }
    let pixels = bilinear(image, area, height, width)?;
    image.replace(height, width, pixels);
    if let Some(mask) = mask {
        *mask = nearest(mask, area, height, width);
    }
    Ok(())
}

fn bilinear(image: &Image, area: Area, height: usize, width: usize) -> Result<Vec<u8>> {
    // No image has a side that does not fit.
    let side = |pixels: usize| u32::try_from(pixels).map_err(|error| Error::invalid("size", error.to_string()));
    let reason = |reason: String| Error::invalid("image", format!("it cannot be resized: {reason}"));
    // With the pixels' type, the compiler makes this one resizer and not those of all types.
    let source = TypedImageRef::<U8x3>::from_buffer(side(image.width())?, side(image.height())?, image.pixels())
        .map_err(|error| reason(error.to_string()))?;
    // A view, and not a crop box, so that no pixel outside of it has an influence: PIL crops first, and then resizes.
    let (left, top) = (side(area.left)?, side(area.top)?);
    let source = TypedCroppedImage::from_ref(&source, left, top, side(area.width)?, side(area.height)?)
        .map_err(|error| reason(error.to_string()))?;
    let mut pixels = vec![0; height * width * 3];
    let mut target = TypedImage::<U8x3>::from_buffer(side(width)?, side(height)?, &mut pixels)
        .map_err(|error| reason(error.to_string()))?;
    let options = ResizeOptions::new().resize_alg(ResizeAlg::Convolution(FilterType::Bilinear));
    scratch::with_resizer(|resizer| resizer.resize_typed(&source, &mut target, &options))
        .map_err(|error| reason(error.to_string()))?;
    Ok(pixels)
}

fn nearest(mask: &Mask, area: Area, height: usize, width: usize) -> Mask {
    let columns = centers(area.width, width);
    let mut labels = Vec::with_capacity(height * width);
    for y in centers(area.height, height) {
        let row = &mask.labels()[(area.top + y) * mask.width() + area.left..][..area.width];
        labels.extend(columns.iter().map(|&x| row[x]));
    }
    Mask::trusted(height, width, labels)
}

/// Which one of `from` places is in the middle of each of `to` equal parts. Pillow adds the parts up, with their rounding.
fn centers(from: usize, to: usize) -> Vec<usize> {
    let step = from as f64 / to as f64;
    let mut next = step * 0.5;
    let mut found = Vec::with_capacity(to);
    for _ in 0..to {
        found.push((next as usize).min(from - 1));
        next += step;
    }
    found
}
