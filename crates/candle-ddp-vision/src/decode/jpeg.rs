//! JPEG files, by zune-jpeg.
use crate::image::{Image, buffer};
use zune_jpeg::JpegDecoder;
use zune_jpeg::errors::DecodeErrors;
use zune_jpeg::zune_core::bytestream::ZCursor;
use zune_jpeg::zune_core::colorspace::ColorSpace;
use zune_jpeg::zune_core::options::DecoderOptions;

pub(super) fn image(bytes: &[u8]) -> Result<Image, String> {
    let reason = |error: DecodeErrors| format!("a damaged JPEG file: {error:?}");
    if is_truncated(bytes) {
        return Err("a damaged JPEG file: its end is missing".to_string());
    }
    // Strict: otherwise the decoder makes up missing data without a word.
    let options = DecoderOptions::default()
        .set_strict_mode(true)
        .set_max_width(u16::MAX.into())
        .set_max_height(u16::MAX.into())
        .jpeg_set_out_colorspace(ColorSpace::RGB);
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(bytes), options);
    decoder.decode_headers().map_err(reason)?;
    let (width, height) = decoder.dimensions().ok_or("a damaged JPEG file: it has no size")?;
    let mut pixels = buffer(height, width)?;
    decoder.decode_into(&mut pixels).map_err(reason)?;
    Ok(Image::trusted(height, width, pixels))
}

/// Whether no end of image (FF D9) follows the last start of scan (FF DA). The decoder does not notice that the last few
/// bytes are missing. Neither pair of bytes occurs in the data of a scan.
fn is_truncated(bytes: &[u8]) -> bool {
    !bytes
        .windows(2)
        .rev()
        .find_map(|pair| (pair[0] == 0xff && matches!(pair[1], 0xd9 | 0xda)).then(|| pair[1] == 0xd9))
        .unwrap_or(false)
}
