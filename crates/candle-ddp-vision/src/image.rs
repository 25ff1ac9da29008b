//! Images and masks in memory.
use super::scratch;
use crate::{Error, Result};

/// The label of pixels that belong to no class, for `ignore_index` of candle-ddp-nn's `CrossEntropyOptions`.
pub const IGNORE_INDEX: i64 = 255;

/// The most pixels that an image may have: 2^28 / 1.5, the number from which on Pillow takes a file for a decompression
/// bomb.
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
    /// An image of its pixels.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there are not `height * width * 3` bytes, if there are none, or if there are more than
    /// 178 956 970 pixels.
    pub fn new(height: usize, width: usize, pixels: Vec<u8>) -> Result<Self> {
        check_bytes("pixels", height, width, 3, pixels.len())?;
        Ok(Self { height, width, pixels })
    }

    /// How many rows it has.
    pub fn height(&self) -> usize {
        self.height
    }

    /// How many columns it has.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Its `height * width * 3` bytes.
    pub fn pixels(&self) -> &[u8] {
        &self.pixels
    }

    /// Its bytes, for transforms that keep its size.
    pub fn pixels_mut(&mut self) -> &mut [u8] {
        &mut self.pixels
    }

    /// For pixels whose number is right.
    pub(super) fn trusted(height: usize, width: usize, pixels: Vec<u8>) -> Self {
        debug_assert_eq!(pixels.len(), height * width * 3);
        Self { height, width, pixels }
    }

    /// Puts another image in the place of this one, whose memory serves the next image that this thread reads.
    pub(super) fn replace(&mut self, height: usize, width: usize, pixels: Vec<u8>) {
        scratch::give_back(std::mem::replace(self, Self::trusted(height, width, pixels)).pixels);
    }
}

impl Mask {
    /// A mask of its labels.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there are not `height * width` of them, if there are none, or if there are more than
    /// 178 956 970.
    pub fn new(height: usize, width: usize, labels: Vec<u8>) -> Result<Self> {
        check_bytes("labels", height, width, 1, labels.len())?;
        Ok(Self { height, width, labels })
    }

    /// How many rows it has.
    pub fn height(&self) -> usize {
        self.height
    }

    /// How many columns it has.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Its `height * width` labels.
    pub fn labels(&self) -> &[u8] {
        &self.labels
    }

    /// Its labels, for transforms that keep its size.
    pub fn labels_mut(&mut self) -> &mut [u8] {
        &mut self.labels
    }

    /// For labels whose number is right.
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

/// Why no image can have this size, if none can.
pub(super) fn check_size(height: usize, width: usize) -> Result<(), String> {
    if height == 0 || width == 0 {
        return Err(format!("an image of {height}×{width} pixels (height × width) would be empty"));
    }
    match height.checked_mul(width) {
        Some(pixels) if pixels <= MAX_PIXELS => Ok(()),
        _ => Err(format!("{height}×{width} pixels are too many: an image may have {MAX_PIXELS}, as in Pillow")),
    }
}

/// Memory for an image of this size, with bytes of no meaning, or why no image can have it.
pub(super) fn buffer(height: usize, width: usize) -> Result<Vec<u8>, String> {
    check_size(height, width)?;
    Ok(scratch::pixels(height * width * 3))
}

fn check_bytes(argument: &'static str, height: usize, width: usize, channels: usize, found: usize) -> Result<()> {
    check_size(height, width).map_err(|reason| Error::invalid(argument, reason))?;
    let expected = height * width * channels;
    if found != expected {
        let reason = format!("{found} bytes, and an image of {height}×{width} pixels needs {expected}");
        return Err(Error::invalid(argument, reason));
    }
    Ok(())
}
