//! Floating-point elements of CPU tensors, so that loops are written once for all dtypes.
use super::math;
use candle_core::cpu::erf::erfc_f64;
use candle_core::{CpuStorage, DType, WithDType};
use candle_ddp_simd::float16;
use half::{bf16, f16};
use std::ops::Neg;

/// The dtype in which sums over a tensor of `dtype` are calculated. An optimizer's state has it, too.
pub fn accumulator(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// A type used for arithmetic: f32 or f64.
pub trait Real: Element<Real = Self> + Neg<Output = Self> + Default {
    /// The square root.
    fn sqrt(self) -> Self;
    /// The absolute value.
    fn abs(self) -> Self;
    /// e to the power of this value.
    fn exp(self) -> Self;
    /// The natural logarithm.
    fn ln(self) -> Self;
    /// The standard normal distribution function.
    fn normal_cdf(self) -> Self;
    /// The hyperbolic tangent.
    fn tanh(self) -> Self;

    /// This plus `value` times `decay`. Without decay, `value` has no effect even if it is infinite.
    #[inline(always)]
    fn plus_decay(self, value: Self, decay: Self) -> Self {
        if decay == Self::default() { self } else { self + value * decay }
    }
}

/// An element of a floating-point tensor. f16 and bf16 are computed in f32.
pub trait Element: WithDType {
    /// The type used for arithmetic and for optimizer state.
    type Real: Real;
    /// The same value.
    fn widen(self) -> Self::Real;
    /// Rounds to the nearest value of this type.
    fn narrow(value: Self::Real) -> Self;
    /// The same elements, if this is the type used for arithmetic.
    fn as_reals(values: &[Self]) -> Option<&[Self::Real]>;
    /// The elements of `storage`, if it has this dtype.
    fn values_mut(storage: &mut CpuStorage) -> Option<&mut [Self]>;
}

/// The dtypes of [`Element`]s.
pub const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];

macro_rules! element {
    ($kind:ty, $variant:ident, $real:ty, $widen:expr, $narrow:expr, $as_reals:expr) => {
        impl Element for $kind {
            type Real = $real;

            #[inline(always)]
            fn widen(self) -> $real {
                $widen(self)
            }

            #[inline(always)]
            fn narrow(value: $real) -> Self {
                $narrow(value)
            }

            #[inline(always)]
            fn as_reals(values: &[Self]) -> Option<&[Self::Real]> {
                $as_reals(values)
            }

            fn values_mut(storage: &mut CpuStorage) -> Option<&mut [Self]> {
                match storage {
                    CpuStorage::$variant(values) => Some(values),
                    _ => None,
                }
            }
        }
    };
}

macro_rules! real {
    ($kind:ident, $variant:ident, $exp:expr, $normal_cdf:expr, $tanh:expr) => {
        element!($kind, $variant, $kind, std::convert::identity, std::convert::identity, Some);

        impl Real for $kind {
            #[inline(always)]
            fn sqrt(self) -> Self {
                $kind::sqrt(self)
            }

            #[inline(always)]
            fn abs(self) -> Self {
                $kind::abs(self)
            }

            #[inline(always)]
            fn exp(self) -> Self {
                $exp(self)
            }

            #[inline(always)]
            fn ln(self) -> Self {
                $kind::ln(self)
            }

            #[inline(always)]
            fn normal_cdf(self) -> Self {
                $normal_cdf(self)
            }

            #[inline(always)]
            fn tanh(self) -> Self {
                $tanh(self)
            }
        }
    };
}

real!(f32, F32, math::exp, math::normal_cdf, math::tanh);
real!(f64, F64, f64::exp, |x: f64| 0.5 * erfc_f64(-x * std::f64::consts::FRAC_1_SQRT_2), f64::tanh);
element!(f16, F16, f32, float16::f16_to_f32, float16::f32_to_f16, |_| None);
element!(bf16, BF16, f32, float16::bf16_to_f32, float16::f32_to_bf16, |_| None);

/// Turns a tensor's dtype into a type: `dispatch!(dtype, E => expression with E, else => otherwise)`, or
/// `dispatch!(dtype, operation, E => expression)`, which returns candle's error with the operation's name for other
/// dtypes.
#[doc(hidden)]
#[macro_export]
macro_rules! dispatch {
    ($dtype:expr, $E:ident => $body:expr, else => $otherwise:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $E = f32;
                $body
            }
            candle_core::DType::F64 => {
                type $E = f64;
                $body
            }
            candle_core::DType::F16 => {
                type $E = half::f16;
                $body
            }
            candle_core::DType::BF16 => {
                type $E = half::bf16;
                $body
            }
            _ => $otherwise,
        }
    };
    ($dtype:expr, $operation:expr, $E:ident => $body:expr) => {{
        let dtype = $dtype;
        $crate::dispatch!(dtype, $E => $body, else => Err(candle_core::Error::from(
            $crate::error::unsupported($operation, dtype),
        )))
    }};
}
