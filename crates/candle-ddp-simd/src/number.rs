//! Elements of every dtype that collectives reduce.
use crate::float16;
use half::{bf16, f16};

/// An element of a tensor of numbers.
pub trait Number: Copy {
    /// The type used for arithmetic: f32 for f16 and bf16, otherwise the type itself.
    type Wide: Arithmetic;

    /// The same value.
    fn widen(self) -> Self::Wide;

    /// Rounds to the nearest value of this type.
    fn narrow(value: Self::Wide) -> Self;
}

/// The operations of reductions. Integers wrap; `smaller` and `larger` return NaN if an operand is NaN, and the first if both
/// are. The bits of a sum or product that is NaN are undefined: compilers may exchange the operands.
pub trait Arithmetic: Copy + Default {
    /// The sum.
    fn plus(self, other: Self) -> Self;
    /// The product.
    fn times(self, other: Self) -> Self;
    /// The minimum.
    fn smaller(self, other: Self) -> Self;
    /// The maximum.
    fn larger(self, other: Self) -> Self;

    /// 1 / `count`; only floating-point numbers are averaged.
    fn reciprocal(count: usize) -> Self;
}

macro_rules! float {
    ($($kind:ty, $wide:ty, $widen:expr, $narrow:expr;)*) => {$(
        impl Number for $kind {
            type Wide = $wide;

            #[inline(always)]
            fn widen(self) -> $wide {
                $widen(self)
            }

            #[inline(always)]
            fn narrow(value: $wide) -> Self {
                $narrow(value)
            }
        }
    )*};
}

float! {
    f32, f32, std::convert::identity, std::convert::identity;
    f64, f64, std::convert::identity, std::convert::identity;
    f16, f32, float16::f16_to_f32, float16::f32_to_f16;
    bf16, f32, float16::bf16_to_f32, float16::f32_to_bf16;
}

macro_rules! real {
    ($($kind:ty),*) => {$(
        impl Arithmetic for $kind {
            #[inline(always)]
            fn plus(self, other: Self) -> Self {
                self + other
            }

            #[inline(always)]
            fn times(self, other: Self) -> Self {
                self * other
            }

            // The comparison is false if `other` is NaN, which is then returned.
            #[inline(always)]
            fn smaller(self, other: Self) -> Self {
                if self < other || self.is_nan() { self } else { other }
            }

            #[inline(always)]
            fn larger(self, other: Self) -> Self {
                if self > other || self.is_nan() { self } else { other }
            }

            #[inline(always)]
            fn reciprocal(count: usize) -> Self {
                1.0 / count as Self
            }
        }
    )*};
}

real!(f32, f64);

macro_rules! integer {
    ($($kind:ty),*) => {$(
        impl Number for $kind {
            type Wide = Self;

            #[inline(always)]
            fn widen(self) -> Self {
                self
            }

            #[inline(always)]
            fn narrow(value: Self) -> Self {
                value
            }
        }

        impl Arithmetic for $kind {
            #[inline(always)]
            fn plus(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            #[inline(always)]
            fn times(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }

            #[inline(always)]
            fn smaller(self, other: Self) -> Self {
                self.min(other)
            }

            #[inline(always)]
            fn larger(self, other: Self) -> Self {
                self.max(other)
            }

            #[inline(always)]
            fn reciprocal(_: usize) -> Self {
                1
            }
        }
    )*};
}

integer!(i64, u32, u8);
