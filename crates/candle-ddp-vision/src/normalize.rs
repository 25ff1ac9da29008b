//! From bytes to tensors.
use super::{Image, Mask};
use crate::{Error, Result};
use candle_core::{Device, Tensor};
use candle_ddp_tensor::collate::Collate;

/// Makes tensors of images: torchvision's `ToTensor` and `Normalize` in one step. A byte `x` of channel `c` becomes
/// `(x / 255 - mean[c]) / std[c]`, in f32; the layout changes from height × width × channel to channel × height × width.
///
/// The default, a mean of 0 and a standard deviation of 1, is `ToTensor` alone.
///
/// ```
/// use candle_ddp_vision::{Image, Normalize};
///
/// let images = [Image::new(1, 2, vec![0, 0, 0, 255, 255, 255])?];
/// let batch = Normalize::default().batch(&images)?; // shape (1, 3, 1, 2)
/// assert_eq!(batch.flatten_all()?.to_vec1::<f32>()?, [0., 1., 0., 1., 0., 1.]);
/// # Ok::<(), candle_ddp_vision::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Normalize {
    /// The mean of each channel, red, green and blue, of values from 0 to 1. Default: 0.
    pub mean: [f32; 3],
    /// The standard deviation of each channel. Default: 1.
    pub std: [f32; 3],
}

impl Default for Normalize {
    fn default() -> Self {
        Self { mean: [0.; 3], std: [1.; 3] }
    }
}

impl Normalize {
    /// The mean and standard deviation of ImageNet, with which nearly all published weights were trained.
    pub const IMAGENET: Self = Self { mean: [0.485, 0.456, 0.406], std: [0.229, 0.224, 0.225] };

    /// The image as a tensor of f32 and of shape (3, height, width), on the CPU.
    ///
    /// # Errors
    /// [`InvalidArgument`](candle_ddp_base::Error::InvalidArgument) if a standard deviation is 0; candle's.
    pub fn apply(&self, image: &Image) -> Result<Tensor> {
        let mut values = Vec::with_capacity(image.pixels().len());
        self.append(image, &self.tables()?, &mut values);
        Ok(Tensor::from_vec(values, (3, image.height(), image.width()), &Device::Cpu)?)
    }

    /// Images of the same size as a tensor of f32 and of shape (N, 3, height, width), on the CPU.
    ///
    /// # Errors
    /// [`InvalidArgument`](candle_ddp_base::Error::InvalidArgument) if there are no images, if they differ in size, or if a standard deviation is 0.
    pub fn batch<'a>(&self, images: impl IntoIterator<Item = &'a Image, IntoIter: Clone>) -> Result<Tensor> {
        let images = images.into_iter();
        let (count, height, width) =
            common_size("images", images.clone().map(|image| (image.height(), image.width())))?;
        let mut values = Vec::with_capacity(count * 3 * height * width);
        let tables = self.tables()?;
        images.for_each(|image| self.append(image, &tables, &mut values));
        Ok(Tensor::from_vec(values, (count, 3, height, width), &Device::Cpu)?)
    }

    /// A batch of samples, for the data loader: the images by [`batch`](Self::batch), and their targets by [`Collate`]. Classes
    /// become a tensor of u32 and of shape (N), masks one of u8 and of shape (N, height, width).
    ///
    /// # Errors
    /// [`InvalidArgument`](candle_ddp_base::Error::InvalidArgument) if there are no samples, if images or masks differ in size, or if a standard deviation is 0.
    pub fn collate<L: Collate>(&self, samples: Vec<(Image, L)>) -> Result<(Tensor, L::Batch)> {
        let (images, labels): (Vec<_>, Vec<_>) = samples.into_iter().unzip();
        Ok((self.batch(&images)?, L::collate(labels)?))
    }

    /// The value of each byte in each channel.
    fn tables(&self) -> Result<[[f32; 256]; 3]> {
        if self.std.contains(&0.) {
            let reason = format!("{:?} must not contain 0, since pixels are divided by it", self.std);
            return Err(Error::invalid("std", reason));
        }
        Ok(std::array::from_fn(|c| std::array::from_fn(|byte| (byte as f32 / 255. - self.mean[c]) / self.std[c])))
    }

    fn append(&self, image: &Image, tables: &[[f32; 256]; 3], values: &mut Vec<f32>) {
        for (channel, table) in tables.iter().enumerate() {
            values.extend(image.pixels().chunks_exact(3).map(|pixel| table[usize::from(pixel[channel])]));
        }
    }
}

/// A tensor of u8 and of shape (N, height, width).
impl Collate for Mask {
    type Batch = Tensor;

    fn collate(masks: Vec<Self>) -> candle_core::Result<Tensor> {
        let (count, height, width) = common_size("masks", masks.iter().map(|mask| (mask.height(), mask.width())))?;
        let mut labels = Vec::with_capacity(count * height * width);
        masks.iter().for_each(|mask| labels.extend_from_slice(mask.labels()));
        Tensor::from_vec(labels, (count, height, width), &Device::Cpu)
    }
}

/// Returns the number of sizes, and their common height and width.
fn common_size(
    argument: &'static str,
    mut sizes: impl Iterator<Item = (usize, usize)>,
) -> Result<(usize, usize, usize)> {
    let (height, width) = sizes.next().ok_or_else(|| Error::invalid(argument, "a batch must have at least one"))?;
    let mut count = 1;
    for (other_height, other_width) in sizes {
        if (other_height, other_width) != (height, width) {
            let reason = format!(
                "all must have the same size: number {count} of the batch has {other_height}×{other_width} pixels (height × \
                 width), the first one {height}×{width}. Transforms such as RandomResizedCrop and CenterCrop do that"
            );
            return Err(Error::invalid(argument, reason));
        }
        count += 1;
    }
    Ok((count, height, width))
}
