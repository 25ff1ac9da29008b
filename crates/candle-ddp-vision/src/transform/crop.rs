//! `RandomCrop` and `CenterCrop`.
use super::Transform;
use crate::Error;
use crate::image::check_size;
use crate::{IGNORE_INDEX, Image, Mask};
use candle_core::Result;
use candle_ddp_tensor::seed::Generator;

/// Cuts a part of this size out of each image, at a random place: torchvision's `RandomCrop` with constant padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RandomCrop {
    /// Height and width of the part. Default: 224 × 224.
    pub size: (usize, usize),
    /// How many pixels to add first, on each side. Default: 0.
    pub padding: usize,
    /// Add pixels where the image is smaller than `size`, as many as are missing, on both sides. Default: false, which makes
    /// such an image an error.
    pub pad_if_needed: bool,
    /// The colour of the pixels that are added. Default: black.
    pub fill: [u8; 3],
    /// The label of the pixels that are added to a mask. Default: [`IGNORE_INDEX`].
    pub mask_fill: u8,
}

impl Default for RandomCrop {
    fn default() -> Self {
        Self { size: (224, 224), padding: 0, pad_if_needed: false, fill: [0; 3], mask_fill: IGNORE_INDEX as u8 }
    }
}

impl Transform for RandomCrop {
    fn apply(&self, image: &mut Image, mask: Option<&mut Mask>, random: &mut Generator) -> Result<()> {
        let padded = |side: usize, wanted: usize| {
            let padded = side.saturating_add(self.padding.saturating_mul(2));
            let missing = wanted.saturating_sub(padded);
            if self.pad_if_needed {
                (padded.saturating_add(missing.saturating_mul(2)), self.padding.saturating_add(missing))
            } else {
                (padded, self.padding)
            }
        };
        let ((height, above), (width, before)) =
            (padded(image.height(), self.size.0), padded(image.width(), self.size.1));
        check_size(height, width).map_err(|reason| Error::invalid("padding", reason))?;
        if height < self.size.0 || width < self.size.1 {
            let reason = format!(
                "{}×{} pixels (height × width) must not exceed the size of the image with its padding, {height}×{width}; \
                 set pad_if_needed, or resize images first",
                self.size.0, self.size.1
            );
            return Err(Error::invalid("size", reason).into());
        }
        let (mut top, mut left) = (0, 0);
        if (height, width) != self.size {
            top = random.below((height - self.size.0 + 1) as u64) as usize;
            left = random.below((width - self.size.1 + 1) as u64) as usize;
        }
        let corner = (top as isize - above as isize, left as isize - before as isize);
        window(image, mask, corner, self.size, self.fill, self.mask_fill)
    }
}

/// Cuts the middle out of each image: torchvision's `CenterCrop`. An image that is smaller gets black pixels around it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CenterCrop {
    /// Height and width of the part. Default: 224 × 224.
    pub size: (usize, usize),
    /// The label of the pixels that are added to a mask. Default: [`IGNORE_INDEX`].
    pub mask_fill: u8,
}

impl Default for CenterCrop {
    fn default() -> Self {
        Self { size: (224, 224), mask_fill: IGNORE_INDEX as u8 }
    }
}

impl Transform for CenterCrop {
    fn apply(&self, image: &mut Image, mask: Option<&mut Mask>, _: &mut Generator) -> Result<()> {
        let start = |side: usize, wanted: usize| match side.checked_sub(wanted) {
            // Python rounds halves to even numbers.
            Some(rest) => (rest as f64 / 2.).round_ties_even() as isize,
            None => -((wanted - side) as isize / 2),
        };
        let corner = (start(image.height(), self.size.0), start(image.width(), self.size.1));
        window(image, mask, corner, self.size, [0; 3], self.mask_fill)
    }
}

/// Cuts a window of this size out of the image. Its upper left corner may lie outside of the image.
fn window(
    image: &mut Image,
    mask: Option<&mut Mask>,
    corner: (isize, isize),
    size: (usize, usize),
    fill: [u8; 3],
    mask_fill: u8,
) -> Result<()> {
    check_size(size.0, size.1).map_err(|reason| Error::invalid("size", reason))?;
    let from = (image.height(), image.width());
    if corner == (0, 0) && size == from {
        return Ok(());
    }
    let pixels = cut(image.pixels(), from, corner, size, fill);
    image.replace(size.0, size.1, pixels);
    if let Some(mask) = mask {
        *mask = Mask::trusted(size.0, size.1, cut(mask.labels(), from, corner, size, [mask_fill]));
    }
    Ok(())
}

fn cut<const C: usize>(
    source: &[u8],
    (height, width): (usize, usize),
    (top, left): (isize, isize),
    size: (usize, usize),
    fill: [u8; C],
) -> Vec<u8> {
    // The first and last rows or columns of the image in the window, and the number of added ones before them.
    let seen = |start: isize, side: usize, wanted: usize| {
        let (first, end) = (start.max(0) as usize, (start + wanted as isize).clamp(0, side as isize) as usize);
        (first.min(end), end, (start.min(0).unsigned_abs()).min(wanted))
    };
    let (first_row, end_row, above) = seen(top, height, size.0);
    let (first, end, before) = seen(left, width, size.1);
    let after = size.1 - before - (end - first);
    let mut target = Vec::with_capacity(size.0 * size.1 * C);
    let pad = |target: &mut Vec<u8>, count: usize| target.extend(std::iter::repeat_n(fill, count).flatten());
    pad(&mut target, above * size.1);
    for row in source.chunks_exact(width * C).take(end_row).skip(first_row) {
        pad(&mut target, before);
        target.extend_from_slice(&row[first * C..end * C]);
        pad(&mut target, after);
    }
    pad(&mut target, (size.0 - above - (end_row - first_row)) * size.1);
    target
}
