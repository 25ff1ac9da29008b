//! Images for training (feature `vision`): the datasets [`ImageFolder`], [`Cifar10`], [`Cifar100`] and [`Ade20k`], and
//! transforms that change an image and its mask together. `docs/vision.md` shows how they are used.
//!
//! An [`Image`] stays bytes, RGB and row by row, until a batch is made of it: [`Normalize`] turns the bytes of many images
//! into one tensor. So a sample that was read ahead takes a quarter of the memory that it would take as a tensor.
//!
//! Values are those of torchvision on images of Pillow, which is what its `ImageFolder` reads:
//!
//! | what | difference from torchvision |
//! |---|---|
//! | PNG, CIFAR | none |
//! | JPEG | most bytes are equal or differ by 1; few, at sharp edges of colours, differ by more than 2. Another decoder has another inverse cosine transform, and upsamples colours with another rounding |
//! | [`Resize`], [`RandomResizedCrop`], [`RandomResize`] | at most 1 of 255 in a byte; none in masks |
//! | crops, flips, [`ColorJitter`] | none |
//! | [`Normalize`] | none |
//!
//! The parameters of random transforms follow torchvision's formulas, with numbers of our [`Generator`](crate::seed::Generator)
//! in the order in which torchvision draws its own.
mod ade20k;
mod cifar;
mod decode;
mod folder;
mod image;
mod normalize;
mod scratch;
mod transform;

pub use ade20k::Ade20k;
pub use cifar::{Cifar10, Cifar100, Cifar100Labels};
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
