//! JPEG and PNG files.
mod jpeg;
mod png;

use super::image::{Image, Mask};
use super::scratch;
use crate::error::data_file;
use crate::{Error, Result};
use std::path::Path;

const PNG: &[u8] = b"\x89PNG\r\n\x1a\n";
const JPEG: &[u8] = b"\xff\xd8\xff";

impl Image {
    /// Reads a JPEG or PNG file, whatever its name is, as Pillow's `convert("RGB")` does: grey becomes RGB, a palette is
    /// looked up, alpha is dropped, CMYK is converted without a colour profile. Of 16 bits per channel, it
    /// takes the upper 8, except that grey is cut off at 255. It ignores the orientation in EXIF data.
    ///
    /// # Errors
    /// [`Io`](candle_ddp_base::Error::Io) if the file cannot be read; [`DataFile`](candle_ddp_base::Error::DataFile) if it is neither JPEG nor PNG, or is damaged. Damage that
    /// libjpeg repairs with a warning is an error here.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        scratch::read(path, |bytes| image(bytes).map_err(|reason| data_file(path, reason)))?
    }

    /// Reads a JPEG or PNG file in memory: see [`open`](Self::open).
    ///
    /// # Errors
    /// [`InvalidArgument`](candle_ddp_base::Error::InvalidArgument) if `bytes` is neither JPEG nor PNG, or is damaged.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        image(bytes).map_err(|reason| Error::invalid("bytes", reason))
    }
}

impl Mask {
    /// Reads the labels of a PNG file: values of 8-bit grey, or indices into a palette.
    ///
    /// # Errors
    /// [`Io`](candle_ddp_base::Error::Io) if the file cannot be read; [`DataFile`](candle_ddp_base::Error::DataFile) if it is another kind of file, or is damaged.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        scratch::read(path, |bytes| mask(bytes).map_err(|reason| data_file(path, reason)))?
    }
}

/// Returns the image, or the fault of the file.
fn image(bytes: &[u8]) -> Result<Image, String> {
    if bytes.starts_with(JPEG) {
        jpeg::image(bytes)
    } else if bytes.starts_with(PNG) {
        png::image(bytes)
    } else {
        Err(unknown(bytes, "JPEG or PNG"))
    }
}

/// Returns the mask, or the fault of the file.
fn mask(bytes: &[u8]) -> Result<Mask, String> {
    if bytes.starts_with(PNG) { png::mask(bytes) } else { Err(unknown(bytes, "PNG")) }
}

fn unknown(bytes: &[u8], expected: &str) -> String {
    let found = match bytes {
        [] => "the file is empty",
        _ if bytes.starts_with(JPEG) => "a JPEG file",
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => "a WebP file",
        [b'B', b'M', ..] => "a BMP file",
        [b'G', b'I', b'F', b'8', ..] => "a GIF file",
        [b'I', b'I', 42, 0, ..] | [b'M', b'M', 0, 42, ..] => "a TIFF file",
        [b'P', b'5' | b'6', b' ' | b'\n' | b'\t' | b'\r', ..] => "a PPM or PGM file",
        _ => "a file of an unknown kind",
    };
    format!("{found}: the file must be {expected}; convert it or remove it")
}
