//! Batches of samples of common types.
use candle_core::{Device, Result, Tensor};
use half::{bf16, f16};

/// A sample of a type that can be collated, as PyTorch's `default_collate` does it:
///
/// | sample | batch of B |
/// |---|---|
/// | `Tensor`, of the same shape and dtype on the same device | `Tensor` with a new first dimension of B |
/// | `u8`, `u32`, `i64`, `f16`, `bf16`, `f32`, `f64` | `Tensor` of shape \[B\] on the CPU |
/// | `String` | `Vec<String>` |
/// | a tuple of two to four of these | the tuple of their batches |
///
/// ```
/// use candle_ddp_tensor::collate::Collate;
///
/// let (numbers, names) = Collate::collate(vec![(7u32, "a".to_string()), (3, "b".to_string())])?;
/// assert_eq!(numbers.to_vec1::<u32>()?, [7, 3]);
/// assert_eq!(names, ["a", "b"]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub trait Collate: Sized {
    /// The type of a batch.
    type Batch;

    /// Makes a batch of samples, in their order.
    ///
    /// # Errors
    /// Returns candle's error if tensors differ in shape, dtype or device, or if there are no tensors.
    fn collate(samples: Vec<Self>) -> Result<Self::Batch>;
}

impl Collate for Tensor {
    type Batch = Tensor;

    fn collate(samples: Vec<Self>) -> Result<Tensor> {
        Tensor::stack(&samples, 0)
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
                Tensor::from_vec(samples, count, &Device::Cpu)
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
