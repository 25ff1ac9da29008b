//! A folder of images with a folder for each class.
use super::{Image, Transform};
use crate::error::{data_file, reading, reading_folder};
use crate::{Error, Result};
use candle_ddp_tensor::seed::Generator;
use parking_lot::Mutex;
use rustix::io::Errno;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::ffi::OsString;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// torchvision's `IMG_EXTENSIONS`, so that indices are the same. Only JPEG and PNG files can be read.
const EXTENSIONS: [&[u8]; 9] = [b".jpg", b".jpeg", b".png", b".ppm", b".bmp", b".pgm", b".tif", b".tiff", b".webp"];

/// Images in a folder for each class: torchvision's `ImageFolder`, with the same classes and the same samples at the same
/// indices.
///
/// ```text
/// root/cat/1.jpg
/// root/cat/deeper/2.png
/// root/dog/1.jpg
/// ```
///
/// A sample is the image and its class, an index into [`classes`](Self::classes). Classes are sorted by name, and the images of
/// a class by folder and name, byte by byte; links are followed. A folder to which several paths lead counts once, with a warning;
/// torchvision reads it again. Files without an image's extension are left out.
/// Other files that torchvision reads (PPM, BMP, TIFF, WebP) have an index, but cannot be decoded.
pub struct ImageFolder<T = ()> {
    classes: Vec<String>,
    samples: Vec<(PathBuf, u32)>,
    transform: T,
    skips_corrupt: bool,
    /// The indices of damaged images.
    skipped: Mutex<BTreeSet<usize>>,
}

impl<T: Transform> ImageFolder<T> {
    /// Lists the images in `root`, once. `transform` is applied to each image that is read; `()` changes nothing.
    ///
    /// # Errors
    /// [`Io`](candle_ddp_base::Error::Io) if a folder cannot be read; [`DataFile`](candle_ddp_base::Error::DataFile) if `root` has no folders, if there are no images in one
    /// of them, or if the name of one is not UTF-8.
    pub fn new(root: impl AsRef<Path>, transform: T) -> Result<Self> {
        let root = root.as_ref();
        let mut classes = Vec::new();
        for (name, path) in entries(root)? {
            if is_folder(&path)? {
                let reason = "the folder's name is the name of a class, and must be UTF-8";
                classes.push(name.into_string().map_err(|_| data_file(&path, reason))?);
            }
        }
        if classes.is_empty() {
            return Err(data_file(root, "it must contain a folder for each class, and contains none"));
        }
        let mut samples = Vec::new();
        let mut empty = Vec::new();
        for (label, class) in (0..).zip(&classes) {
            let before = samples.len();
            samples.extend(images(&root.join(class))?.into_iter().map(|path| (path, label)));
            if samples.len() == before {
                empty.push(class.as_str());
            }
        }
        if !empty.is_empty() {
            const SHOWN: usize = 20;
            let mut reason = "each class must have images (.jpg, .jpeg, .png), and these have none: ".to_string();
            reason += &empty[..empty.len().min(SHOWN)].join(", ");
            if empty.len() > SHOWN {
                reason += &format!(" and {} more", empty.len() - SHOWN);
            }
            return Err(data_file(root, reason));
        }
        Ok(Self { classes, samples, transform, skips_corrupt: false, skipped: Mutex::default() })
    }
}

impl<T> ImageFolder<T> {
    /// Whether an image that cannot be decoded is replaced by the next one, instead of being an error, as it is at first.
    ///
    /// The dataset's length stays the same: instead of a damaged image, [`get`](Self::get) returns the next one that can be decoded, so ranks
    /// have as many batches as without damage. [`skipped`](Self::skipped) lists the damaged ones. Leave this off in an evaluation, which would
    /// count the other image twice.
    pub fn skip_corrupt(self, skip: bool) -> Self {
        Self { skips_corrupt: skip, ..self }
    }

    /// The names of the classes, in the order of their indices.
    pub fn classes(&self) -> &[String] {
        &self.classes
    }

    /// The index of each class.
    pub fn class_to_idx(&self) -> HashMap<String, u32> {
        self.classes.iter().cloned().zip(0..).collect()
    }

    /// The files and their classes, by the index of the sample.
    pub fn samples(&self) -> &[(PathBuf, u32)] {
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

    /// The damaged images that were skipped so far, each once, ordered by index.
    pub fn skipped(&self) -> Vec<&Path> {
        self.skipped.lock().iter().map(|&index| self.samples[index].0.as_path()).collect()
    }
}

impl<T: Transform> ImageFolder<T> {
    /// The image and the class of the sample `index`, transformed with numbers of `random`.
    ///
    /// # Errors
    /// [`InvalidArgument`](candle_ddp_base::Error::InvalidArgument) if `index` is not below the number of samples; [`Io`](candle_ddp_base::Error::Io) if the file cannot be read;
    /// [`DataFile`](candle_ddp_base::Error::DataFile) if it is damaged, or if the transform fails. With [`skip_corrupt`](Self::skip_corrupt),
    /// damage is an error only if all images are damaged.
    pub fn get(&self, index: usize, random: &mut Generator) -> Result<(Image, u32)> {
        let len = self.samples.len();
        if index >= len {
            return Err(Error::invalid("index", format!("{index} must be less than the number of samples, {len}")));
        }
        let mut last = None;
        for index in (index..len).chain(0..index) {
            let (path, label) = &self.samples[index];
            if self.skips_corrupt && self.skipped.lock().contains(&index) {
                continue;
            }
            match Image::open(path) {
                Ok(mut image) => {
                    let failed = |error: candle_core::Error| data_file(path, error.to_string());
                    self.transform.apply(&mut image, None, random).map_err(failed)?;
                    return Ok((image, *label));
                }
                Err(error @ Error::Base(candle_ddp_base::Error::DataFile { .. })) if self.skips_corrupt => {
                    if self.skipped.lock().insert(index) {
                        log::warn!("skipped: {error}");
                    }
                    last = Some(error);
                }
                Err(error) => return Err(error),
            }
        }
        let none = || data_file(&self.samples[index].0, format!("all {len} images are damaged, including this one"));
        Err(last.unwrap_or_else(none))
    }
}

/// The images in `folder` and the folders in it. As in torchvision, the folders are sorted by their paths as strings, and the
/// files of each by name.
fn images(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut folders = vec![folder.to_path_buf()];
    let mut files: Vec<(PathBuf, OsString)> = Vec::new();
    // By device and inode: with links, one folder may have any number of paths.
    let mut seen = HashSet::new();
    while let Some(folder) = folders.pop() {
        let metadata = folder.metadata().map_err(|error| reading_folder(&folder, error))?;
        if !seen.insert((metadata.dev(), metadata.ino())) {
            log::warn!("{}: several paths lead to this folder, and its images count once", folder.display());
            continue;
        }
        for (name, path) in entries(&folder)? {
            if is_folder(&path)? {
                folders.push(path);
            } else if is_image(name.as_bytes()) {
                files.push((folder.clone(), name));
            }
        }
    }
    files.sort_by(|(a, a_name), (b, b_name)| {
        let (a, b) = (a.as_os_str().as_bytes(), b.as_os_str().as_bytes());
        a.cmp(b).then_with(|| a_name.as_bytes().cmp(b_name.as_bytes()))
    });
    Ok(files.into_iter().map(|(folder, name)| folder.join(name)).collect())
}

/// Whether it is a folder or a link to one. An inaccessible folder is an error: its images would be missing on this rank.
fn is_folder(path: &Path) -> Result<bool> {
    match path.metadata() {
        Ok(metadata) => Ok(metadata.is_dir()),
        // A link to nothing, or to itself.
        Err(error) if error.kind() == ErrorKind::NotFound || Errno::from_io_error(&error) == Some(Errno::LOOP) => {
            Ok(false)
        }
        Err(error) => Err(reading(path, error)),
    }
}

fn is_image(name: &[u8]) -> bool {
    EXTENSIONS.iter().any(|end| name.len() >= end.len() && name[name.len() - end.len()..].eq_ignore_ascii_case(end))
}

/// The names in a folder, sorted, with their paths.
pub(super) fn entries(folder: &Path) -> Result<Vec<(OsString, PathBuf)>> {
    let failed = |error| reading_folder(folder, error);
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        found.push((entry.file_name(), entry.path()));
    }
    found.sort();
    Ok(found)
}
