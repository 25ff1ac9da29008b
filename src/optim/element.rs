//! The numbers that kernels compute with, and those that parameters consist of.
use crate::float16;
use candle_core::{CpuStorage, DType};
use half::{bf16, f16};
use std::ops::{Add, Div, Mul, Neg, Sub};

/// What arithmetic is done in: f32 or f64.
pub trait Real:
    Element<Real = Self>
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + PartialOrd
    + Default
    + 'static
{
    /// The nearest value.
    fn from_f64(value: f64) -> Self;
    /// The same value.
    fn to_f64(self) -> f64;
    /// The square root.
    fn sqrt(self) -> Self;
    /// Without the sign.
    fn abs(self) -> Self;

    /// This plus `value` times `decay`: nothing of `value` without decay, also where it is infinite.
    #[inline(always)]
    fn plus_decay(self, value: Self, decay: Self) -> Self {
        if decay == Self::default() { self } else { self + value * decay }
    }
}

/// What a parameter or a gradient consists of.
pub trait Element: Copy + Send + Sync + 'static {
    /// What is computed with, and what optimizers keep their state in.
    type Real: Real;
    /// The value to compute with.
    fn load(self) -> Self::Real;
    /// The nearest value that can be stored.
    fn store(value: Self::Real) -> Self;
    /// The elements of `storage`, if it holds this kind.
    fn slice_mut(storage: &mut CpuStorage) -> Option<&mut [Self]>;
    /// The elements of `storage`, if it holds this kind.
    fn slice(storage: &CpuStorage) -> Option<&[Self]>;
}

/// The dtypes that there are kernels for.
pub(super) const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];

/// The dtype of arithmetic and state for parameters of `dtype`; none if there is no kernel for it.
pub(super) fn state_dtype(dtype: DType) -> Option<DType> {
    match dtype {
        DType::F64 => Some(DType::F64),
        DType::F32 | DType::F16 | DType::BF16 => Some(DType::F32),
        _ => None,
    }
}

macro_rules! element {
    ($kind:ty, $variant:ident, $real:ty, $load:expr, $store:expr) => {
        impl Element for $kind {
            type Real = $real;

            #[inline(always)]
            fn load(self) -> $real {
                $load(self)
            }

            #[inline(always)]
            fn store(value: $real) -> Self {
                $store(value)
            }

            fn slice_mut(storage: &mut CpuStorage) -> Option<&mut [Self]> {
                match storage {
                    CpuStorage::$variant(values) => Some(values),
                    _ => None,
                }
            }

            fn slice(storage: &CpuStorage) -> Option<&[Self]> {
                match storage {
                    CpuStorage::$variant(values) => Some(values),
                    _ => None,
                }
            }
        }
    };
}

macro_rules! real {
    ($kind:ident, $variant:ident) => {
        element!($kind, $variant, $kind, std::convert::identity, std::convert::identity);

        impl Real for $kind {
            #[inline(always)]
            fn from_f64(value: f64) -> Self {
                value as $kind
            }

            #[inline(always)]
            fn to_f64(self) -> f64 {
                self.into()
            }

            #[inline(always)]
            fn sqrt(self) -> Self {
                $kind::sqrt(self)
            }

            #[inline(always)]
            fn abs(self) -> Self {
                $kind::abs(self)
            }
        }
    };
}

real!(f32, F32);
real!(f64, F64);
element!(f16, F16, f32, float16::f16_to_f32, float16::f32_to_f16);
element!(bf16, BF16, f32, float16::bf16_to_f32, float16::f32_to_bf16);

/// Sums of this many terms are made in the elements' own arithmetic, and added up in f64.
const BLOCK: usize = 2048;
/// Sums that are made side by side, so that the compiler can use vector instructions.
const LANES: usize = 16;

/// The sum of the squares.
#[inline(always)]
pub(super) fn sum_of_squares<E: Element>(values: &[E]) -> f64 {
    let mut total = 0f64;
    for block in values.chunks(BLOCK) {
        let mut lanes = [E::Real::default(); LANES];
        let mut vectors = block.chunks_exact(LANES);
        for vector in vectors.by_ref() {
            for (lane, value) in lanes.iter_mut().zip(vector) {
                let value = value.load();
                *lane = *lane + value * value;
            }
        }
        let rest = vectors.remainder().iter().map(|value| (value.load() * value.load()).to_f64());
        total += lanes.into_iter().map(Real::to_f64).sum::<f64>() + rest.sum::<f64>();
    }
    total
}

/// The largest absolute value; NaN if there is one, as in PyTorch.
pub(super) fn largest<E: Element>(values: &[E]) -> f64 {
    let mut largest = 0f64;
    for value in values {
        let value = value.load().abs().to_f64();
        if value > largest || value.is_nan() {
            largest = value;
            if value.is_nan() {
                break;
            }
        }
    }
    largest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_exact_for_small_integers_of_any_number() {
        for count in [0, 1, 15, 16, 17, 2047, 2048, 2049, 10_000] {
            let values: Vec<f32> = (0..count).map(|index| (index % 3) as f32).collect();
            let expected: f64 = values.iter().map(|value| f64::from(value * value)).sum();
            assert_eq!(sum_of_squares(&values), expected, "{count}");
            let halves: Vec<bf16> = values.iter().map(|value| bf16::from_f32(*value)).collect();
            assert_eq!(sum_of_squares(&halves), expected, "{count}");
        }
    }
}
