//! Datasets of images, transforms, and [`models`] (feature `vision`): everything in [`candle_ddp_vision`]. `docs/vision.md` shows how they are
//! used.
use crate::data::Dataset;
use crate::seed::Generator;
#[doc(no_inline)]
pub use candle_ddp_vision::*;

macro_rules! datasets {
    ($($dataset:ident -> $target:ty,)+) => {$(
        impl<T: Transform> Dataset for $dataset<T> {
            type Sample = (Image, $target);

            fn len(&self) -> usize {
                $dataset::len(self)
            }

            fn get(&self, index: usize, random: &mut Generator) -> crate::Result<Self::Sample> {
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

impl From<Error> for crate::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Io { context, error } => Self::Io { context, error },
            Error::InvalidArgument { argument, reason } => Self::InvalidArgument { argument, reason },
            Error::DataFile { path, reason } => Self::DataFile { path, reason },
            Error::Candle(error) => error.into(),
            error => Self::Candle(error.into()),
        }
    }
}
