//! The widest vectors that the processor has, for loops that the compiler vectorises.

/// Runs `|| body` or `move || body`, compiled for AVX-512, AVX2 or the plain processor, whichever this processor has, without
/// a change to its results: nothing is fused or reordered that was not so before.
///
/// The wider instructions reach only what is inlined into the body, so functions that it calls have to be
/// `#[inline(always)]`, and should not be closures. The macro marks the body itself so. Otherwise a large one may be left out
/// of line, and a small one is simplified on its own, for the plain processor, before it is inlined: loops over f16 and bf16
/// then take two to four times as long.
macro_rules! vectorise {
    (|| $body:expr) => {
        pulp::Arch::new().dispatch(
            #[inline(always)]
            || $body,
        )
    };
    (move || $body:expr) => {
        pulp::Arch::new().dispatch(
            #[inline(always)]
            move || $body,
        )
    };
}
pub(crate) use vectorise;
