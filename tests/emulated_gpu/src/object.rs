//! The functions of all libraries write results to addresses and return zero. The objects that they create are boxes.
use std::ffi::{c_int, c_void};

/// Gives `value` to the caller of a function, and returns success.
///
/// # Safety
/// `to` must be valid for a write.
pub(crate) unsafe fn give<T>(to: *mut T, value: T) -> c_int {
    // SAFETY: guaranteed by the caller.
    unsafe { to.write(value) };
    0
}

/// Gives a new object to the caller.
///
/// # Safety
/// `to` must be valid for a write.
pub(crate) unsafe fn create<T>(to: *mut *mut c_void, value: T) -> c_int {
    // SAFETY: guaranteed by the caller.
    unsafe { give(to, Box::into_raw(Box::new(value)).cast()) }
}

/// Functions that destroy objects which came from [`create`].
macro_rules! destroyers {
    ($($function:ident: $Type:ty),*) => {
        $(
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $function(object: *mut c_void) -> std::ffi::c_int {
                // SAFETY: guaranteed by the caller.
                drop(unsafe { Box::from_raw(object.cast::<$Type>()) });
                0
            }
        )*
    };
}
pub(crate) use destroyers;
