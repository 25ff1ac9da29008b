//! Reductions of buffers in ascending order of the ranks, rounded to the type after each step. As in NCCL, `Avg` of
//! floats multiplies before summing, and `Avg` of integers divides the sum.
use super::wire::{Dtype, Op};
use half::{bf16, f16};
use std::ops::{Add, Mul};

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

/// Implements it for a type, with its sum, product, factor and quotient.
macro_rules! element {
    ($type:ty, $bytes:literal: $add:expr, $multiply:expr, $share:expr, $divide:expr) => {
        impl Element<$bytes> for $type {
            fn read(bytes: [u8; $bytes]) -> Self {
                Self::from_le_bytes(bytes)
            }
            fn write(self) -> [u8; $bytes] {
                self.to_le_bytes()
            }
            fn add(self, other: Self) -> Self {
                $add(self, other)
            }
            fn multiply(self, other: Self) -> Self {
                $multiply(self, other)
            }
            fn smaller(self, other: Self) -> Self {
                self.min(other)
            }
            fn larger(self, other: Self) -> Self {
                self.max(other)
            }
            fn share(ranks: usize) -> Option<Self> {
                $share(1.0 / ranks as f64)
            }
            fn divide(self, ranks: usize) -> Self {
                $divide(self, ranks)
            }
        }
    };
}

macro_rules! integers {
    ($($type:ty, $bytes:literal)*) => {
        $(element!($type, $bytes: <$type>::wrapping_add, <$type>::wrapping_mul, |_: f64| None,
            |sum, ranks| (i128::from(sum) / ranks as i128) as $type);)*
    };
}

macro_rules! floats {
    ($($type:ty, $bytes:literal, $from_f64:expr;)*) => {
        $(element!($type, $bytes: Add::add, Mul::mul, |share: f64| Some($from_f64(share)), |mean, _| mean);)*
    };
}

integers!(i8, 1 u8, 1 i32, 4 u32, 4 i64, 8 u64, 8);
// Those of 16 bits are converted through f32, because NCCL computes the factor in f32.
floats! {
    f32, 4, |share: f64| share as f32;
    f64, 8, |share: f64| share;
    f16, 2, |share: f64| f16::from_f32(share as f32);
    bf16, 2, |share: f64| bf16::from_f32(share as f32);
}

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
