//! PNG files, by image-rs' decoder.
use crate::vision::image::{Image, Mask, buffer, check_size};
use png::{BitDepth, ColorType, Decoder, DecodingError, Limits, Transformations};
use std::io::Cursor;

pub(super) fn image(bytes: &[u8]) -> Result<Image, String> {
    let mut decoder = decoder(bytes);
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
    let mut decoder = decoder(bytes);
    let header = decoder.read_header_info().map_err(reason)?;
    let bits = match (header.color_type, header.bit_depth) {
        (ColorType::Indexed, depth) => depth as usize,
        (ColorType::Grayscale, BitDepth::Eight) => 8,
        (color, depth) => {
            let found = format!("{color:?} with {} bits per channel", depth as usize);
            return Err(format!("a mask is a PNG file of 8-bit grey or of a palette, and this is one of {found}"));
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

fn decoder(bytes: &[u8]) -> Decoder<Cursor<&[u8]>> {
    // The limit is on what the decoder allocates. Its default of 64 MiB is less than a row's buffers of a large image.
    Decoder::new_with_limits(Cursor::new(bytes), Limits { bytes: 1 << 30 })
}

/// Height, width, colours and bytes of the image.
fn frame(decoder: Decoder<Cursor<&[u8]>>) -> Result<(usize, usize, ColorType, Vec<u8>), String> {
    let mut reader = decoder.read_info().map_err(reason)?;
    let (width, height) = reader.info().size();
    let (height, width) = (height as usize, width as usize);
    check_size(height, width)?;
    let size = reader.output_buffer_size().ok_or("a PNG file that is too large")?;
    let mut data = vec![0; size];
    reader.next_frame(&mut data).map_err(reason)?;
    Ok((height, width, reader.output_color_type().0, data))
}

fn reason(error: DecodingError) -> String {
    format!("a damaged PNG file: {error}")
}
