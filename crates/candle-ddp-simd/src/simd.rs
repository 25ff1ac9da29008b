//! Uses the processor's widest vectors in loops that the compiler vectorises.

/// Runs `|| body` or `move || body`, compiled for AVX-512, AVX2 or the baseline, whichever this processor supports. The
/// results do not change: nothing is fused or reordered.
///
/// The wider instructions reach only code that is inlined into the body. So functions that it calls must be
/// `#[inline(always)]`, and should not be closures. The macro marks the body itself so. Otherwise a large body may not
/// be inlined, and a small one is simplified separately, for the baseline processor, before it is inlined: loops over
/// f16 and bf16 then take two to four times as long.
#[doc(hidden)]
#[macro_export]
macro_rules! vectorise {
    (|| $body:expr) => {
        $crate::pulp::Arch::new().dispatch($crate::simd::once(
            #[inline(always)]
            || $body,
        ))
    };
    (move || $body:expr) => {
        $crate::pulp::Arch::new().dispatch($crate::simd::once(
            #[inline(always)]
            move || $body,
        ))
    };
}

/// Returns `body`. Its type is what matters: a closure that is written as an argument of this function is called once as it
/// is. Any other is called once through a function that the compiler makes, which is not `#[inline(always)]`.
#[inline(always)]
pub fn once<R, F: FnOnce() -> R>(body: F) -> F {
    body
}
