//! Writing pictures to files.
use png::{BitDepth, ColorType, Encoder};
use std::fs::File;
use std::io::{BufWriter, Error, Result};
use std::path::Path;

/// Writes a grey picture, row by row, as a PNG file.
pub(crate) fn write_grey_png(path: &Path, [height, width]: [usize; 2], pixels: &[u8]) -> Result<()> {
    let mut encoder = Encoder::new(BufWriter::new(File::create(path)?), width as u32, height as u32);
    encoder.set_color(ColorType::Grayscale);
    encoder.set_depth(BitDepth::Eight);
    let mut writer = encoder.write_header()?;
    writer.write_image_data(pixels)?;
    Ok(writer.finish()?)
}

/// Writes a picture, RGB and row by row, as a JPEG file.
pub(crate) fn write_jpeg(path: &Path, [height, width]: [usize; 2], pixels: &[u8]) -> Result<()> {
    let encoder = jpeg_encoder::Encoder::new_file(path, 90).map_err(Error::other)?;
    encoder.encode(pixels, width as u16, height as u16, jpeg_encoder::ColorType::Rgb).map_err(Error::other)
}
