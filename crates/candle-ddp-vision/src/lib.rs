#![doc = include_str!("../README.md")]

mod ade20k;
mod cifar;
mod decode;
mod error;
mod folder;
mod image;
pub mod models;
mod normalize;
mod scratch;
mod transform;

pub use ade20k::Ade20k;
pub use candle_ddp_tensor::{Error, Result};
pub use cifar::{Cifar10, Cifar100};
pub use folder::ImageFolder;
pub use image::{IGNORE_INDEX, Image, Mask};
pub use normalize::Normalize;
pub use transform::{
    CenterCrop, ColorJitter, RandomCrop, RandomHorizontalFlip, RandomResize, RandomResizedCrop, Resize, Transform,
};

/// The part of a dataset's images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split {
    /// The training images.
    Train,
    /// The images to evaluate with: CIFAR's test set, ADE20K's validation set.
    Eval,
}

/// Datasets show their length: their samples are too many, and their transforms need not have `Debug`.
macro_rules! debug {
    ($($dataset:ident)+) => {$(
        impl<T> std::fmt::Debug for $dataset<T> {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct(stringify!($dataset)).field("len", &self.len()).finish_non_exhaustive()
            }
        }
    )+};
}

debug!(Ade20k Cifar10 Cifar100 ImageFolder);
