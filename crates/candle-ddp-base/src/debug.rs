//! `Debug` for types that show only some of what they have.

/// Implements `Debug` as `Name { first: …, second: …, .. }`: of the fields that it names, or, with `|this|`, of what it
/// says about a value.
#[doc(hidden)]
#[macro_export]
macro_rules! debug_fields {
    ($(<$($generic:ident $(: $bound:path)?),+>)? $name:ident $(<$($argument:tt),+>)?:
     |$this:ident| $($field:ident = $shown:expr),*) => {
        impl $(<$($generic $(: $bound)?),+>)? ::std::fmt::Debug for $name $(<$($argument),+>)? {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                let $this = self;
                f.debug_struct(stringify!($name))$(.field(stringify!($field), &$shown))*.finish_non_exhaustive()
            }
        }
    };
    ($(<$($generic:ident $(: $bound:path)?),+>)? $name:ident $(<$($argument:tt),+>)? $(: $($field:ident),+)?) => {
        $crate::debug_fields!(
            $(<$($generic $(: $bound)?),+>)? $name $(<$($argument),+>)?: |_this| $($($field = _this.$field),+)?
        );
    };
}
