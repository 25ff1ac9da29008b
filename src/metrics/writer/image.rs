//! Images as PNG files.
use crate::{Error, Result};
use candle_core::{DType, Tensor};

pub(super) struct Image {
    pub(super) height: usize,
    pub(super) width: usize,
    pub(super) channels: usize,
    pub(super) png: Vec<u8>,
}

impl Image {
    pub(super) fn of(image: &Tensor) -> Result<Self> {
        let shape = |reason: String| Error::invalid("image", reason);
        let (channels, height, width) = image
            .dims3()
            .map_err(|_| shape(format!("it must have the shape (channels, height, width), not {:?}", image.dims())))?;
        let color = match channels {
            1 => png::ColorType::Grayscale,
            3 => png::ColorType::Rgb,
            4 => png::ColorType::Rgba,
            _ => return Err(shape(format!("it must have 1, 3 or 4 channels, not {channels}"))),
        };
        let [width_32, height_32] = [width, height].map(|side| u32::try_from(side).ok().filter(|side| *side > 0));
        let (Some(width_32), Some(height_32)) = (width_32, height_32) else {
            return Err(shape(format!("its sides must be from 1 to {}, not {height} and {width}", u32::MAX)));
        };
        let pixels = bytes(&image.permute((1, 2, 0))?)?;
        let mut png = Vec::new();
        let mut encoder = png::Encoder::new(&mut png, width_32, height_32);
        encoder.set_color(color);
        encoder.set_depth(png::BitDepth::Eight);
        let written = encoder.write_header().and_then(|mut writer| {
            writer.write_image_data(&pixels)?;
            writer.finish()
        });
        written.map_err(|error| shape(format!("it cannot be written as PNG: {error}")))?;
        Ok(Self { height, width, channels, png })
    }
}

fn bytes(image: &Tensor) -> Result<Vec<u8>> {
    match image.dtype() {
        DType::U8 => Ok(image.flatten_all()?.to_vec1()?),
        dtype if dtype.is_float() => {
            let values: Vec<f32> = image.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
            if values.iter().any(|value| value.is_nan()) {
                return Err(Error::invalid("image", "its values must be from 0 to 1, and some are NaN"));
            }
            // As PyTorch: beyond the range it is white or black.
            Ok(values.into_iter().map(|value| (value * 255.) as u8).collect())
        }
        dtype => Err(Error::invalid("image", format!("it must have the dtype U8 or a float, not {dtype:?}"))),
    }
}
