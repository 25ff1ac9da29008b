//! Batches of samples of common types.
use crate::Result;
use candle_core::{Device, Tensor};
use half::{bf16, f16};

/// A sample that [`default_collate`] can make batches of.
pub trait Collate: Sized {
    /// What many samples become.
    type Batch;

    /// Makes a batch of samples, in their order.
    ///
    /// # Errors
    /// Samples that do not fit together.
    fn collate(samples: Vec<Self>) -> Result<Self::Batch>;
}

/// Makes a batch of samples, as PyTorch's `default_collate` does:
///
/// | sample | batch of B |
/// |---|---|
/// | `Tensor`, of the same shape and dtype on the same device | `Tensor` with a new first dimension of B |
/// | `u8`, `u32`, `i64`, `f16`, `bf16`, `f32`, `f64` | `Tensor` of shape \[B\] on the CPU |
/// | `String` | `Vec<String>` |
/// | a tuple of two to four such | the tuple of their batches |
///
/// Other types of the program can implement [`Collate`], or the loader is given another function.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_ddp::data::default_collate;
///
/// let image = Tensor::zeros((3, 32, 32), DType::F32, &Device::Cpu)?;
/// let (images, labels) = default_collate(vec![(image.clone(), 7u32), (image, 3)])?;
/// assert_eq!(images.dims(), [2, 3, 32, 32]);
/// assert_eq!(labels.to_vec1::<u32>()?, [7, 3]);
/// # Ok::<(), candle_ddp::Error>(())
/// ```
///
/// # Errors
/// candle's, of samples that differ in shape, dtype or device, and of no samples at all.
pub fn default_collate<S: Collate>(samples: Vec<S>) -> Result<S::Batch> {
    S::collate(samples)
}

impl Collate for Tensor {
    type Batch = Tensor;

    fn collate(samples: Vec<Self>) -> Result<Tensor> {
        Ok(Tensor::stack(&samples, 0)?)
    }
}

impl Collate for String {
    type Batch = Vec<String>;

    fn collate(samples: Vec<Self>) -> Result<Vec<String>> {
        Ok(samples)
    }
}

macro_rules! numbers {
    ($($number:ty)+) => {$(
        impl Collate for $number {
            type Batch = Tensor;

            fn collate(samples: Vec<Self>) -> Result<Tensor> {
                let count = samples.len();
                Ok(Tensor::from_vec(samples, count, &Device::Cpu)?)
            }
        }
    )+};
}

numbers!(u8 u32 i64 f16 bf16 f32 f64);

macro_rules! tuple {
    ($($field:ident $value:ident)+) => {
        impl<$($field: Collate),+> Collate for ($($field,)+) {
            type Batch = ($($field::Batch,)+);

            #[allow(non_snake_case)] // each list is named after the type of its elements
            fn collate(samples: Vec<Self>) -> Result<Self::Batch> {
                $(let mut $field = Vec::with_capacity(samples.len());)+
                for ($($value,)+) in samples {
                    $($field.push($value);)+
                }
                Ok(($($field::collate($field)?,)+))
            }
        }
    };
}

tuple!(A a B b);
tuple!(A a B b C c);
tuple!(A a B b C c D d);
