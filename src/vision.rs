//! Datasets of images, transforms, and [`models`] (feature `vision`): everything in [`candle_ddp_vision`]. `docs/vision.md` shows how they are
//! used.
#[doc(no_inline)]
pub use candle_ddp_vision::*;
