#![doc = include_str!("../README.md")]

mod ade20k;
mod cifar;
mod decode;
mod error;
mod folder;
mod image;
mod normalize;
mod scratch;
mod transform;

pub use ade20k::Ade20k;
pub use cifar::{Cifar10, Cifar100, Cifar100Labels};
pub use error::{Error, Result};
pub use folder::{ImageFolder, ImageFolderOptions};
pub use image::{IGNORE_INDEX, Image, Mask};
pub use normalize::Normalize;
pub use transform::{
    CenterCrop, ColorJitter, RandomCrop, RandomHorizontalFlip, RandomResize, RandomResizedCrop, Resize, ResizeSize,
    Transform,
};

/// Which images of a dataset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split {
    /// Those to train with.
    Train,
    /// Those to evaluate with: CIFAR's test set, ADE20K's validation set.
    Eval,
}
