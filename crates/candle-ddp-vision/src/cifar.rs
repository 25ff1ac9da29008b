//! CIFAR-10 and CIFAR-100, from the binary files that their authors distribute.
use super::{Image, Split, Transform};
use crate::error::{data_file, reading};
use crate::{Error, Result};
use candle_ddp_tensor::seed::Generator;
use std::fs;
use std::path::Path;

const SIDE: usize = 32;
/// The number of bytes of an image: first all red ones, row by row, then all green ones, then all blue ones.
const BYTES: usize = 3 * SIDE * SIDE;

/// CIFAR-10: 50 000 training images and 10 000 test images of 32 × 32 pixels, in 10 classes. The images are read into memory
/// (154 MB and 31 MB).
///
/// The files come from `cifar-10-binary.tar.gz`, <https://www.cs.toronto.edu/~kriz/cifar.html>, unpacked. A sample is the
/// image and its class: airplane, automobile, bird, cat, deer, dog, frog, horse, ship, truck.
pub struct Cifar10<T = ()> {
    records: Records,
    transform: T,
}

/// CIFAR-100: 50 000 training images and 10 000 test images of 32 × 32 pixels, in 100 classes of 20 superclasses. The images are
/// read into memory (154 MB and 31 MB).
///
/// The files come from `cifar-100-binary.tar.gz`, <https://www.cs.toronto.edu/~kriz/cifar.html>, unpacked; `fine_label_names.txt`
/// and `coarse_label_names.txt` in the same folder have the names of the classes. A sample is the image and its class.
pub struct Cifar100<T = ()> {
    records: Records,
    transform: T,
    /// Which of a record's labels is returned.
    label: usize,
}

impl<T: Transform> Cifar10<T> {
    /// Reads `data_batch_1.bin` to `data_batch_5.bin` or `test_batch.bin` from `root`, or from the folder
    /// `cifar-10-batches-bin` in it. A file may have any number of records. `transform` is applied to each image; `()` changes nothing.
    ///
    /// # Errors
    /// [`Io`](candle_ddp_base::Error::Io) if a file cannot be read; [`DataFile`](candle_ddp_base::Error::DataFile) if it does not consist of whole records, or has a label above 9.
    pub fn new(root: impl AsRef<Path>, split: Split, transform: T) -> Result<Self> {
        let files: &[_] = match split {
            Split::Train => {
                &["data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin", "data_batch_4.bin", "data_batch_5.bin"]
            }
            Split::Eval => &["test_batch.bin"],
        };
        let records = Records::read(root.as_ref(), "cifar-10-batches-bin", files, &[10])?;
        Ok(Self { records, transform })
    }
}

impl<T: Transform> Cifar100<T> {
    /// Reads `train.bin` or `test.bin` from `root`, or from the folder `cifar-100-binary` in it. `transform` is applied to each
    /// image; `()` changes nothing.
    ///
    /// # Errors
    /// [`Io`](candle_ddp_base::Error::Io) if the file cannot be read; [`DataFile`](candle_ddp_base::Error::DataFile) if it does not consist of whole records, or has a coarse label
    /// above 19 or a fine one above 99.
    pub fn new(root: impl AsRef<Path>, split: Split, transform: T) -> Result<Self> {
        let file = match split {
            Split::Train => "train.bin",
            Split::Eval => "test.bin",
        };
        let records = Records::read(root.as_ref(), "cifar-100-binary", &[file], &[20, 100])?;
        Ok(Self { records, transform, label: 1 })
    }

    /// The same images with the 20 superclasses in place of the 100 classes.
    pub fn coarse(self) -> Self {
        Self { label: 0, ..self }
    }
}

impl<T> Cifar10<T> {
    /// The number of samples.
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// Whether there are no samples.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<T: Transform> Cifar10<T> {
    /// The image and the class of the sample `index`, transformed with numbers of `random`.
    ///
    /// # Errors
    /// [`InvalidArgument`](candle_ddp_base::Error::InvalidArgument) if `index` is not below the number of samples; the transform's.
    pub fn get(&self, index: usize, random: &mut Generator) -> Result<(Image, u32)> {
        let (mut image, labels) = self.records.get(index)?;
        self.transform.apply(&mut image, None, random)?;
        Ok((image, labels[0].into()))
    }
}

impl<T> Cifar100<T> {
    /// The number of samples.
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// Whether there are no samples.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<T: Transform> Cifar100<T> {
    /// The image and the class of the sample `index`, transformed with numbers of `random`.
    ///
    /// # Errors
    /// [`InvalidArgument`](candle_ddp_base::Error::InvalidArgument) if `index` is not below the number of samples; the transform's.
    pub fn get(&self, index: usize, random: &mut Generator) -> Result<(Image, u32)> {
        let (mut image, labels) = self.records.get(index)?;
        self.transform.apply(&mut image, None, random)?;
        Ok((image, labels[self.label].into()))
    }
}

/// Records of a few labels, one byte each, and an image.
struct Records {
    bytes: Vec<u8>,
    labels: usize,
}

impl Records {
    /// Reads `files` of records whose labels are below `classes`.
    fn read(root: &Path, folder: &str, files: &[&str], classes: &[u8]) -> Result<Self> {
        let folder = [root.join(folder), root.to_path_buf()].into_iter().find(|folder| folder.join(files[0]).exists());
        let folder = folder.unwrap_or_else(|| root.to_path_buf());
        let record = classes.len() + BYTES;
        let mut bytes = Vec::new();
        for file in files {
            let path = folder.join(file);
            let read = fs::read(&path).map_err(|error| reading(&path, error))?;
            if read.is_empty() || read.len() % record != 0 {
                let reason = format!(
                    "its size, {} bytes, is not a multiple of the record size, {record}: unpack the binary version of the dataset again",
                    read.len()
                );
                return Err(data_file(&path, reason));
            }
            for (number, labels) in read.chunks_exact(record).enumerate() {
                if let Some((label, below)) = labels.iter().zip(classes).find(|(label, below)| label >= below) {
                    let reason = format!(
                        "the label of record {number}, {label}, must be less than the number of classes, {below}"
                    );
                    return Err(data_file(&path, reason));
                }
            }
            bytes.extend(read);
        }
        Ok(Self { bytes, labels: classes.len() })
    }

    fn len(&self) -> usize {
        self.bytes.len() / (self.labels + BYTES)
    }

    fn get(&self, index: usize) -> Result<(Image, &[u8])> {
        let record = self.bytes.chunks_exact(self.labels + BYTES).nth(index);
        let record = record.ok_or_else(|| {
            Error::invalid("index", format!("{index} must be less than the number of samples, {}", self.len()))
        })?;
        let (labels, planes) = record.split_at(self.labels);
        let pixels = (0..SIDE * SIDE).flat_map(|pixel| [0, 1, 2].map(|channel| planes[channel * SIDE * SIDE + pixel]));
        Ok((Image::trusted(SIDE, SIDE, pixels.collect()), labels))
    }
}
