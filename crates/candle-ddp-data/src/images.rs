//! The datasets of images as a [`Dataset`].
use super::Dataset;
use candle_ddp_state::seed::Generator;
use candle_ddp_vision::{Ade20k, Cifar10, Cifar100, Image, ImageFolder, Mask, Transform};

macro_rules! datasets {
    ($($dataset:ident -> $target:ty,)+) => {$(
        impl<T: Transform> Dataset for $dataset<T> {
            type Sample = (Image, $target);

            fn len(&self) -> usize {
                $dataset::len(self)
            }

            fn get(&self, index: usize, random: &mut Generator) -> candle_ddp_state::Result<Self::Sample> {
                Ok($dataset::get(self, index, random)?)
            }
        }
    )+};
}

datasets! {
    Ade20k -> Mask,
    Cifar10 -> u32,
    Cifar100 -> u32,
    ImageFolder -> u32,
}
