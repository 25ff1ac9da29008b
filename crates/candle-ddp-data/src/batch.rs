//! Batches that move to another device.
use candle_core::{Device, Tensor};
use candle_ddp_state::Result;
use half::{bf16, f16};

/// A batch, whose tensors a [`DataLoader`](super::DataLoader) moves to its device: a tensor, a number or a string, or a tuple, a
/// list or an option of such. A program's own types implement it in a few lines:
///
/// ```
/// use candle_core::Tensor;
/// use candle_ddp::data::Batch;
///
/// struct Images {
///     pixels: Tensor,
///     labels: Tensor,
///     files: Vec<String>,
/// }
///
/// impl Batch for Images {
///     fn map_tensors(self, f: &mut dyn FnMut(Tensor) -> candle_ddp::Result<Tensor>) -> candle_ddp::Result<Self> {
///         Ok(Self { pixels: self.pixels.map_tensors(f)?, labels: self.labels.map_tensors(f)?, ..self })
///     }
/// }
/// ```
pub trait Batch: Sized {
    /// The batch with `f` of each of its tensors, always in the same order.
    ///
    /// # Errors
    /// The errors of `f`.
    fn map_tensors(self, f: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self>;
}

impl Batch for Tensor {
    fn map_tensors(self, f: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
        f(self)
    }
}

impl<B: Batch> Batch for Vec<B> {
    fn map_tensors(self, f: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
        self.into_iter().map(|batch| batch.map_tensors(f)).collect()
    }
}

impl<B: Batch> Batch for Option<B> {
    fn map_tensors(self, f: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
        self.map(|batch| batch.map_tensors(f)).transpose()
    }
}

macro_rules! no_tensors {
    ($($type:ty)+) => {$(
        impl Batch for $type {
            fn map_tensors(self, _: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
                Ok(self)
            }
        }
    )+};
}

no_tensors!(() bool u8 u16 u32 u64 usize i8 i16 i32 i64 isize f16 bf16 f32 f64 String);

macro_rules! tuple {
    ($($field:ident $value:ident)+) => {
        impl<$($field: Batch),+> Batch for ($($field,)+) {
            fn map_tensors(self, f: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
                let ($($value,)+) = self;
                Ok(($($value.map_tensors(f)?,)+))
            }
        }
    };
}

tuple!(A a B b);
tuple!(A a B b C c);
tuple!(A a B b C c D d);

pub(super) fn to_device<B: Batch>(batch: B, device: &Device) -> Result<B> {
    batch.map_tensors(&mut |tensor| Ok(tensor.to_device(device)?))
}
