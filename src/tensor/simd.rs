//! The widest vectors that the processor has, for loops that the compiler vectorises.

/// Runs `f` compiled once more for AVX2 where the processor has it, without a change to its results: nothing is fused or
/// reordered that was not so before.
///
/// That reaches only what is inlined into `f`, so that the functions it calls have to be `#[inline(always)]`.
#[inline(always)]
pub(crate) fn vectorise<R>(f: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(f)
}
