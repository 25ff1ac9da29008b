//! Transforms of images and their masks.
mod color_jitter;
mod crop;
mod flip;
mod hsv;
mod random_resized_crop;
mod resample;
mod resize;

pub use color_jitter::ColorJitter;
pub use crop::{CenterCrop, RandomCrop};
pub use flip::RandomHorizontalFlip;
pub use random_resized_crop::RandomResizedCrop;
pub use resize::{RandomResize, Resize};

use super::{Image, Mask};
use candle_core::Result;
use candle_ddp_tensor::seed::Generator;

/// A change of an image, and in the same way of its mask, if there is one.
///
/// A tuple or a `Vec` of transforms is a transform that applies them in order (torchvision's `Compose`); `()` changes nothing.
///
/// ```
/// use candle_ddp_tensor::seed::Generator;
/// use candle_ddp_vision::{Image, RandomHorizontalFlip, Resize, Transform};
///
/// let transform = (Resize::Exact(8, 8), RandomHorizontalFlip::default());
/// let mut image = Image::new(2, 3, vec![0; 18])?;
/// transform.apply(&mut image, None, &mut Generator::new(0))?;
/// assert_eq!((image.height(), image.width()), (8, 8));
/// # Ok::<(), candle_ddp_vision::Error>(())
/// ```
pub trait Transform: Send + Sync {
    /// Changes `image`, and `mask`, which has the same size. Random transforms draw their numbers from `random`.
    ///
    /// # Errors
    /// [`InvalidArgument`](candle_ddp_base::Error::InvalidArgument)(crate::Error::InvalidArgument), in candle's error, if the transform is invalid, or cannot be
    /// applied to an image of this size.
    fn apply(&self, image: &mut Image, mask: Option<&mut Mask>, random: &mut Generator) -> Result<()>;
}

impl<T: Transform + ?Sized> Transform for Box<T> {
    fn apply(&self, image: &mut Image, mask: Option<&mut Mask>, random: &mut Generator) -> Result<()> {
        (**self).apply(image, mask, random)
    }
}

impl<T: Transform> Transform for Vec<T> {
    fn apply(&self, image: &mut Image, mut mask: Option<&mut Mask>, random: &mut Generator) -> Result<()> {
        self.iter().try_for_each(|transform| transform.apply(image, mask.as_deref_mut(), random))
    }
}

impl Transform for () {
    fn apply(&self, _: &mut Image, _: Option<&mut Mask>, _: &mut Generator) -> Result<()> {
        Ok(())
    }
}

macro_rules! tuple {
    ($($transform:ident)+) => {
        impl<$($transform: Transform),+> Transform for ($($transform,)+) {
            #[allow(non_snake_case)] // each transform is named after its type
            fn apply(&self, image: &mut Image, mut mask: Option<&mut Mask>, random: &mut Generator) -> Result<()> {
                let ($($transform,)+) = self;
                $($transform.apply(image, mask.as_deref_mut(), random)?;)+
                Ok(())
            }
        }
    };
}

tuple!(A);
tuple!(A B);
tuple!(A B C);
tuple!(A B C D);
tuple!(A B C D E);
tuple!(A B C D E F);
tuple!(A B C D E F G);
tuple!(A B C D E F G H);

/// A rectangle of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Area {
    pub(super) top: usize,
    pub(super) left: usize,
    pub(super) height: usize,
    pub(super) width: usize,
}
