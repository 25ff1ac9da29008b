//! The widest vectors that the processor has, for loops that the compiler vectorises.

/// Runs `f` compiled once more for AVX2 where the processor has it, without a change to its results: nothing is fused
/// or reordered that was not so before.
///
/// That reaches only what is inlined into `f`, so that the functions it calls have to be `#[inline(always)]`.
#[inline(always)]
pub(crate) fn vectorise<R>(f: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(f)
}

/// Defines a function whose whole body is compiled once more for the vectors that the processor may have, however large it
/// is. A large closure for [`vectorise`] may be left out of line by the compiler, which then compiles it for the oldest
/// processors. What the body calls still has to be `#[inline(always)]`, and should not be a closure. The function has the
/// parameters `<'a, T>`, and uses both.
macro_rules! vectorised {
    ($(
        $(#[$meta:meta])*
        $visibility:vis fn $name:ident<'a, T: $bound:ident>($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)?
        $body:block
    )*) => {$(
        $(#[$meta])*
        $visibility fn $name<'a, T: $bound>($($argument: $type),*) $(-> $result)? {
            struct Kernel<'a, T: $bound> {
                $($argument: $type),*
            }

            impl<'a, T: $bound> pulp::NullaryFnOnce for Kernel<'a, T> {
                type Output = $crate::tensor::vectorised!(@result $($result)?);

                #[inline(always)]
                fn call(self) -> Self::Output {
                    let Self { $($argument),* } = self;
                    $body
                }
            }

            pulp::Arch::new().dispatch(Kernel { $($argument),* })
        }
    )*};
    (@result $result:ty) => { $result };
    (@result) => { () };
}
pub(crate) use vectorised;
