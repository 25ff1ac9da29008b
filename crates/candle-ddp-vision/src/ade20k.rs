//! ADE20K: scenes and the class of each of their pixels.
use super::folder::entries;
use super::{Image, Mask, Split, Transform};
use crate::error::data_file;
use crate::{Error, Result};
use candle_ddp_tensor::seed::Generator;
use std::path::{Path, PathBuf};

/// ADE20K in the version of the scene parsing challenge: 20 210 training images and 2 000 validation images, with one of 150
/// classes for each pixel.
///
/// The files come from `ADEChallengeData2016.zip`, unpacked:
///
/// ```text
/// images/training/ADE_train_00000001.jpg         annotations/training/ADE_train_00000001.png
/// images/validation/ADE_val_00000001.jpg         annotations/validation/ADE_val_00000001.png
/// ```
///
/// A sample is the image and its mask. The files have the classes 1 to 150, and 0 for everything else. A mask has the classes 0
/// to 149, and [`IGNORE_INDEX`](super::IGNORE_INDEX) for everything else, so that it counts neither in the loss nor in the evaluation.
pub struct Ade20k<T = ()> {
    /// Image and annotation.
    samples: Vec<(PathBuf, PathBuf)>,
    transform: T,
}

/// The number of classes.
const CLASSES: u8 = 150;

impl<T: Transform> Ade20k<T> {
    /// Looks for images and annotations in `root`, or in the folder `ADEChallengeData2016` in it, once, and sorts them by name.
    /// `transform` is applied to each image and its mask; `()` changes nothing.
    ///
    /// # Errors
    /// [`Io`](candle_ddp_base::Error::Io) if a folder cannot be read; [`DataFile`](candle_ddp_base::Error::DataFile) if it has no images, or if an image has no annotation.
    pub fn new(root: impl AsRef<Path>, split: Split, transform: T) -> Result<Self> {
        let root = root.as_ref();
        let inner = root.join("ADEChallengeData2016");
        let root = if inner.is_dir() { &inner } else { root };
        let split = match split {
            Split::Train => "training",
            Split::Eval => "validation",
        };
        let (images, annotations) = (root.join("images").join(split), root.join("annotations").join(split));
        let mut samples = Vec::new();
        for (name, image) in entries(&images)? {
            if image.extension().is_none_or(|end| !end.eq_ignore_ascii_case("jpg")) {
                continue;
            }
            let annotation = annotations.join(name).with_extension("png");
            if !annotation.is_file() {
                let reason = format!("its annotation is missing: {}", annotation.display());
                return Err(data_file(&image, reason));
            }
            samples.push((image, annotation));
        }
        if samples.is_empty() {
            return Err(data_file(&images, "the folder must contain images (.jpg), and has none"));
        }
        Ok(Self { samples, transform })
    }
}

impl<T> Ade20k<T> {
    /// The images and their annotations, by the index of the sample.
    pub fn samples(&self) -> &[(PathBuf, PathBuf)] {
        &self.samples
    }

    /// The number of samples.
    pub fn len(&self) -> usize {
        self.samples.len()
    }

    /// Whether there are no samples.
    pub fn is_empty(&self) -> bool {
        self.samples.is_empty()
    }
}

impl<T: Transform> Ade20k<T> {
    /// The image and the mask of the sample `index`, transformed with numbers of `random`.
    ///
    /// # Errors
    /// [`InvalidArgument`](candle_ddp_base::Error::InvalidArgument) if `index` is not below the number of samples; [`Io`](candle_ddp_base::Error::Io) if a file cannot be read; [`DataFile`](candle_ddp_base::Error::DataFile)
    /// if one is damaged, if image and mask differ in size, if a label is above 150, or if the transform fails.
    pub fn get(&self, index: usize, random: &mut Generator) -> Result<(Image, Mask)> {
        let sample = self.samples.get(index);
        let (path, annotation) = sample.ok_or_else(|| {
            Error::invalid("index", format!("{index} must be less than the number of samples, {}", self.samples.len()))
        })?;
        let (mut image, mut mask) = (Image::open(path)?, Mask::open(annotation)?);
        if (image.height(), image.width()) != (mask.height(), mask.width()) {
            let reason = format!(
                "its size, {}×{} pixels (height × width), must be that of its annotation {}, {}×{}",
                image.height(),
                image.width(),
                annotation.display(),
                mask.height(),
                mask.width()
            );
            return Err(data_file(path, reason));
        }
        // 0 becomes 255, which is IGNORE_INDEX.
        mask.labels_mut().iter_mut().for_each(|label| *label = label.wrapping_sub(1));
        if let Some(label) = mask.labels().iter().find(|&&label| (CLASSES..u8::MAX).contains(&label)) {
            let reason = format!("its label {} must be at most {CLASSES}", label + 1);
            return Err(data_file(annotation, reason));
        }
        self.transform
            .apply(&mut image, Some(&mut mask), random)
            .map_err(|error| data_file(path, error.to_string()))?;
        Ok((image, mask))
    }
}
