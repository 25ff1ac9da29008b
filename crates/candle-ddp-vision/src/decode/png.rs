//! PNG files, by image-rs' decoder.
use crate::image::{Image, Mask, buffer, check_size};
use png::{BitDepth, ColorType, Decoder, DecodingError, Limits, Transformations};
use std::io::Cursor;

pub(super) fn image(bytes: &[u8]) -> Result<Image, String> {
    let mut decoder = decoder(bytes)?;
    let header = decoder.read_header_info().map_err(reason)?;
    // Pillow cuts 16-bit grey off at 255, and takes the upper byte of everything else.
    let wide_grey = header.color_type == ColorType::Grayscale && header.bit_depth == BitDepth::Sixteen;
    // Palettes, 1 to 4 bits, and transparent colours become 8 bits per channel.
    let narrow = if wide_grey { Transformations::IDENTITY } else { Transformations::STRIP_16 };
    decoder.set_transformations(Transformations::EXPAND | narrow);
    let (height, width, color, data) = frame(decoder)?;
    let mut pixels = buffer(height, width)?;
    let rgb = pixels.chunks_exact_mut(3);
    match color {
        ColorType::Rgb => pixels.copy_from_slice(&data),
        ColorType::Rgba => rgb.zip(data.chunks_exact(4)).for_each(|(to, from)| to.copy_from_slice(&from[..3])),
        ColorType::GrayscaleAlpha if wide_grey => {
            rgb.zip(data.chunks_exact(4)).for_each(|(to, from)| to.fill(cut_off(from)));
        }
        ColorType::Grayscale if wide_grey => {
            rgb.zip(data.chunks_exact(2)).for_each(|(to, from)| to.fill(cut_off(from)));
        }
        ColorType::GrayscaleAlpha => rgb.zip(data.chunks_exact(2)).for_each(|(to, from)| to.fill(from[0])),
        ColorType::Grayscale => rgb.zip(&data).for_each(|(to, from)| to.fill(*from)),
        ColorType::Indexed => return Err("a damaged PNG file: its palette is missing".to_string()),
    }
    Ok(Image::trusted(height, width, pixels))
}

pub(super) fn mask(bytes: &[u8]) -> Result<Mask, String> {
    let mut decoder = decoder(bytes)?;
    let header = decoder.read_header_info().map_err(reason)?;
    let bits = match (header.color_type, header.bit_depth) {
        (ColorType::Indexed, depth) => depth as usize,
        (ColorType::Grayscale, BitDepth::Eight) => 8,
        (color, depth) => {
            let found = format!("{color:?} with {} bits per channel", depth as usize);
            return Err(format!("a mask must be a PNG file of 8-bit grey or with a palette, not of {found}"));
        }
    };
    let (height, width, _, data) = frame(decoder)?;
    if bits == 8 {
        return Ok(Mask::trusted(height, width, data));
    }
    let (stride, per_byte, lowest) = ((width * bits).div_ceil(8), 8 / bits, (1 << bits) - 1);
    let label = |row: &[u8], x: usize| row[x / per_byte] >> (8 - bits - x % per_byte * bits) & lowest;
    let labels = data.chunks_exact(stride).flat_map(|row| (0..width).map(move |x| label(row, x))).collect();
    Ok(Mask::trusted(height, width, labels))
}

/// A 16-bit number, at most 255.
fn cut_off(big_endian: &[u8]) -> u8 {
    if big_endian[0] == 0 { big_endian[1] } else { u8::MAX }
}

/// Returns a decoder whose memory is bounded by the sizes of the file and of the picture. A colour profile or text may expand to
/// a thousand times its size in the file; nothing here uses them, so neither is read.
fn decoder(bytes: &[u8]) -> Result<Decoder<Cursor<&[u8]>>, String> {
    let mut decoder = Decoder::new(Cursor::new(bytes));
    decoder.set_ignore_iccp_chunk(true);
    decoder.set_ignore_text_chunk(true);
    let (width, height) = decoder.read_header_info().map_err(reason)?.size();
    check_size(height as usize, width as usize)?;
    // A row has up to 8 bytes per pixel. The rest is for EXIF data, kept unchanged in a buffer that doubles.
    decoder.set_limits(Limits { bytes: width as usize * 8 + bytes.len() * 2 + (64 << 10) });
    Ok(decoder)
}

/// Returns height, width, colours and bytes of the image.
fn frame(decoder: Decoder<Cursor<&[u8]>>) -> Result<(usize, usize, ColorType, Vec<u8>), String> {
    let mut reader = decoder.read_info().map_err(reason)?;
    let (width, height) = reader.info().size();
    let (height, width) = (height as usize, width as usize);
    let size = reader.output_buffer_size().ok_or("the PNG file is too large")?;
    let mut data = vec![0; size];
    reader.next_frame(&mut data).map_err(reason)?;
    Ok((height, width, reader.output_color_type().0, data))
}

fn reason(error: DecodingError) -> String {
    format!("a damaged PNG file: {error}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::borrow::Cow;

    /// A picture of 4 × 4 pixels, with 8 MiB of zeros as profile, as each kind of text, and as EXIF data.
    fn bomb() -> Vec<u8> {
        const ZEROS: usize = 8 << 20;
        let text = "\0".repeat(ZEROS);
        let mut info = png::Info::with_size(4, 4);
        (info.color_type, info.bit_depth) = (ColorType::Rgb, BitDepth::Eight);
        info.icc_profile = Some(Cow::Owned(text.clone().into_bytes()));
        info.exif_metadata = Some(Cow::Owned(text.clone().into_bytes()));
        let mut bytes = Vec::new();
        let mut encoder = png::Encoder::with_info(&mut bytes, info).unwrap();
        encoder.add_ztxt_chunk("Comment".to_string(), text.clone()).unwrap();
        encoder.add_itxt_chunk("Comment".to_string(), text).unwrap();
        let mut writer = encoder.write_header().unwrap();
        writer.write_image_data(&[7; 48]).unwrap();
        writer.finish().unwrap();
        bytes
    }

    #[test]
    fn profiles_and_text_are_not_expanded() {
        let bytes = bomb();
        let reader = decoder(&bytes).unwrap().read_info().unwrap();
        let info = reader.info();
        assert!(info.icc_profile.is_none() && info.compressed_latin1_text.is_empty() && info.utf8_text.is_empty());
        assert_eq!(image(&bytes).unwrap().pixels(), [7; 48]);
    }

    #[test]
    fn a_size_that_no_picture_has_is_refused_before_anything_is_read() {
        let mut bytes = bomb();
        bytes[16..24].copy_from_slice(&[0, 1, 0, 0, 0, 1, 0, 0]);
        let sum = crc32(&bytes[12..29]);
        bytes[29..33].copy_from_slice(&sum.to_be_bytes());
        assert!(image(&bytes).unwrap_err().contains("65536×65536 pixels are too many"), "{:?}", image(&bytes));
    }

    fn crc32(bytes: &[u8]) -> u32 {
        !bytes
            .iter()
            .fold(!0, |sum, byte| (0..8).fold(sum ^ u32::from(*byte), |sum, _| (sum >> 1) ^ (0xedb8_8320 * (sum & 1))))
    }
}
