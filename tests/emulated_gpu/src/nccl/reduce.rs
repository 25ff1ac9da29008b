//! Reductions of buffers in ascending order of the ranks, rounded to the type after each step. As in NCCL, `Avg` of
//! floats multiplies before summing, and `Avg` of integers divides the sum.
use super::wire::{Dtype, Op};
use half::{bf16, f16};

/// A number of `N` bytes.
trait Element<const N: usize>: Copy {
    fn read(bytes: [u8; N]) -> Self;
    fn write(self) -> [u8; N];
    fn add(self, other: Self) -> Self;
    fn multiply(self, other: Self) -> Self;
    fn smaller(self, other: Self) -> Self;
    fn larger(self, other: Self) -> Self;
    /// Returns the factor applied before a mean, if the type has one.
    fn share(ranks: usize) -> Option<Self>;
    /// Completes a mean for types without a factor.
    fn divide(self, ranks: usize) -> Self;
}

macro_rules! integer {
    ($type:ty, $bytes:literal) => {
        impl Element<$bytes> for $type {
            fn read(bytes: [u8; $bytes]) -> Self {
                Self::from_le_bytes(bytes)
            }
            fn write(self) -> [u8; $bytes] {
                self.to_le_bytes()
            }
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            fn multiply(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
            fn smaller(self, other: Self) -> Self {
                self.min(other)
            }
            fn larger(self, other: Self) -> Self {
                self.max(other)
            }
            fn share(_: usize) -> Option<Self> {
                None
            }
            fn divide(self, ranks: usize) -> Self {
                (i128::from(self) / ranks as i128) as Self
            }
        }
    };
}

integer!(i8, 1);
integer!(u8, 1);
integer!(i32, 4);
integer!(u32, 4);
integer!(i64, 8);
integer!(u64, 8);

macro_rules! float {
    ($type:ty, $bytes:literal, $from_f64:expr) => {
        impl Element<$bytes> for $type {
            fn read(bytes: [u8; $bytes]) -> Self {
                Self::from_le_bytes(bytes)
            }
            fn write(self) -> [u8; $bytes] {
                self.to_le_bytes()
            }
            fn add(self, other: Self) -> Self {
                self + other
            }
            fn multiply(self, other: Self) -> Self {
                self * other
            }
            fn smaller(self, other: Self) -> Self {
                self.min(other)
            }
            fn larger(self, other: Self) -> Self {
                self.max(other)
            }
            fn share(ranks: usize) -> Option<Self> {
                Some($from_f64(1.0 / ranks as f64))
            }
            fn divide(self, _: usize) -> Self {
                self
            }
        }
    };
}

float!(f32, 4, |share: f64| share as f32);
float!(f64, 8, |share: f64| share);
// Converted through f32, because NCCL computes the factor in f32.
float!(f16, 2, |share: f64| f16::from_f32(share as f32));
float!(bf16, 2, |share: f64| bf16::from_f32(share as f32));

/// Reduces the buffers of all ranks, which have the same length.
pub(super) fn reduce(bodies: Vec<Vec<u8>>, dtype: Dtype, op: Op) -> Vec<u8> {
    match dtype {
        Dtype::I8 => reduce_as::<1, i8>(bodies, op),
        Dtype::U8 => reduce_as::<1, u8>(bodies, op),
        Dtype::I32 => reduce_as::<4, i32>(bodies, op),
        Dtype::U32 => reduce_as::<4, u32>(bodies, op),
        Dtype::I64 => reduce_as::<8, i64>(bodies, op),
        Dtype::U64 => reduce_as::<8, u64>(bodies, op),
        Dtype::F16 => reduce_as::<2, f16>(bodies, op),
        Dtype::F32 => reduce_as::<4, f32>(bodies, op),
        Dtype::F64 => reduce_as::<8, f64>(bodies, op),
        Dtype::BF16 => reduce_as::<2, bf16>(bodies, op),
    }
}

fn reduce_as<const N: usize, T: Element<N>>(mut bodies: Vec<Vec<u8>>, op: Op) -> Vec<u8> {
    let ranks = bodies.len();
    if op == Op::Avg
        && let Some(share) = T::share(ranks)
    {
        bodies.iter_mut().for_each(|body| change::<N, T>(body, |value| value.multiply(share)));
    }
    let mut bodies = bodies.into_iter();
    let mut result = bodies.next().unwrap_or_default();
    for body in bodies {
        match op {
            Op::Sum | Op::Avg => fold::<N, T>(&mut result, &body, T::add),
            Op::Prod => fold::<N, T>(&mut result, &body, T::multiply),
            Op::Min => fold::<N, T>(&mut result, &body, T::smaller),
            Op::Max => fold::<N, T>(&mut result, &body, T::larger),
        }
    }
    if op == Op::Avg {
        change::<N, T>(&mut result, |value| value.divide(ranks));
    }
    result
}

/// A loop that compilers vectorise.
fn fold<const N: usize, T: Element<N>>(result: &mut [u8], body: &[u8], step: impl Fn(T, T) -> T) {
    for (a, b) in result.as_chunks_mut::<N>().0.iter_mut().zip(body.as_chunks::<N>().0) {
        *a = step(T::read(*a), T::read(*b)).write();
    }
}

fn change<const N: usize, T: Element<N>>(body: &mut [u8], step: impl Fn(T) -> T) {
    for value in body.as_chunks_mut::<N>().0 {
        *value = step(T::read(*value)).write();
    }
}
