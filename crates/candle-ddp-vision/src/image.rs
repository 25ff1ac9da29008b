//! Images and masks in memory.
use super::scratch;
use crate::{Error, Result};

/// The label of pixels without a class, for `ignore_index` of candle-ddp-nn's `CrossEntropyOptions`.
pub const IGNORE_INDEX: i64 = 255;

/// The largest number of pixels of an image: 2^28 / 1.5. Pillow takes a larger image for a decompression bomb.
const MAX_PIXELS: usize = 2 * (1024 * 1024 * 1024 / 4 / 3);

/// An image of bytes: RGB, row by row (height × width × 3).
#[derive(Clone, PartialEq, Eq)]
pub struct Image {
    height: usize,
    width: usize,
    pixels: Vec<u8>,
}

/// The class of each pixel of an image, row by row (height × width).
#[derive(Clone, PartialEq, Eq)]
pub struct Mask {
    height: usize,
    width: usize,
    labels: Vec<u8>,
}

impl Image {
    /// An image of these pixels: `height * width * 3` bytes, row by row.
    ///
    /// # Errors
    /// [`InvalidArgument`](candle_ddp_base::Error::InvalidArgument) for another number of bytes, for an empty image, and for more than 178 956 970 pixels.
    pub fn new(height: usize, width: usize, pixels: Vec<u8>) -> Result<Self> {
        check_bytes("pixels", height, width, 3, pixels.len())?;
        Ok(Self { height, width, pixels })
    }

    /// The number of rows.
    pub fn height(&self) -> usize {
        self.height
    }

    /// The number of columns.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The `height * width * 3` bytes.
    pub fn pixels(&self) -> &[u8] {
        &self.pixels
    }

    /// The bytes, for transforms that keep the size.
    pub fn pixels_mut(&mut self) -> &mut [u8] {
        &mut self.pixels
    }

    /// An image whose number of bytes is known to be right.
    pub(super) fn trusted(height: usize, width: usize, pixels: Vec<u8>) -> Self {
        debug_assert_eq!(pixels.len(), height * width * 3);
        Self { height, width, pixels }
    }

    /// Replaces this image by another one. Its memory serves the next image that this thread reads.
    pub(super) fn replace(&mut self, height: usize, width: usize, pixels: Vec<u8>) {
        scratch::give_back(std::mem::replace(self, Self::trusted(height, width, pixels)).pixels);
    }
}

impl Mask {
    /// A mask of these `height * width` labels, row by row.
    ///
    /// # Errors
    /// [`InvalidArgument`](candle_ddp_base::Error::InvalidArgument) for another number of labels, for an empty mask, and for more than 178 956 970 pixels.
    pub fn new(height: usize, width: usize, labels: Vec<u8>) -> Result<Self> {
        check_bytes("labels", height, width, 1, labels.len())?;
        Ok(Self { height, width, labels })
    }

    /// The number of rows.
    pub fn height(&self) -> usize {
        self.height
    }

    /// The number of columns.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The `height * width` labels.
    pub fn labels(&self) -> &[u8] {
        &self.labels
    }

    /// The labels, for transforms that keep the size.
    pub fn labels_mut(&mut self) -> &mut [u8] {
        &mut self.labels
    }

    /// A mask whose number of labels is known to be right.
    pub(super) fn trusted(height: usize, width: usize, labels: Vec<u8>) -> Self {
        debug_assert_eq!(labels.len(), height * width);
        Self { height, width, labels }
    }
}

impl std::fmt::Debug for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Image({}×{})", self.height, self.width)
    }
}

impl std::fmt::Debug for Mask {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Mask({}×{})", self.height, self.width)
    }
}

/// Returns the reason why no image can have this size, if there is one.
pub(super) fn check_size(height: usize, width: usize) -> Result<(), String> {
    if height == 0 || width == 0 {
        return Err(format!("height and width must be at least 1, not {height}×{width}"));
    }
    match height.checked_mul(width) {
        Some(pixels) if pixels <= MAX_PIXELS => Ok(()),
        _ => {
            Err(format!("{height}×{width} pixels are too many: an image must have at most {MAX_PIXELS}, as in Pillow"))
        }
    }
}

/// Returns memory with arbitrary bytes for an image of this size, or the reason why no image can have it.
pub(super) fn buffer(height: usize, width: usize) -> Result<Vec<u8>, String> {
    check_size(height, width)?;
    Ok(scratch::pixels(height * width * 3))
}

fn check_bytes(argument: &'static str, height: usize, width: usize, channels: usize, found: usize) -> Result<()> {
    check_size(height, width).map_err(|reason| Error::invalid(argument, reason))?;
    let expected = height * width * channels;
    if found != expected {
        let reason = format!("an image of {height}×{width} pixels must have {expected} bytes, not {found}");
        return Err(Error::invalid(argument, reason));
    }
    Ok(())
}
