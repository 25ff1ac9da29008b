//! The widest vectors that the processor has, for loops that the compiler vectorises.

/// Runs `f` compiled for AVX-512 or AVX2 where the processor has them, without a change to its results: nothing is fused
/// or reordered that was not so before.
///
/// The wider instructions reach only what is inlined into `f`, so functions that it calls have to be `#[inline(always)]`.
/// So has the closure itself: `vectorise(#[inline(always)] || …)`. Otherwise it is simplified on its own, for the plain
/// processor, before it is inlined, and loops over f16 and bf16 then take two to four times as long.
#[inline(always)]
pub(crate) fn vectorise<R>(f: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(f)
}
