//! The counts of the emulated GPU.
#![allow(unsafe_code)] // they come from a symbol of its library
use std::ffi::{CStr, c_char, c_void};

unsafe extern "C" {
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// Whether a count of this name is one of operations: of work that a stream executes.
pub fn is_operation(name: &str) -> bool {
    !name.starts_with("wait for ") && !["allocation", "call for no bytes"].contains(&name)
}

/// What this thread has asked of the emulated GPU since the last call, by name. None on a real GPU.
pub fn take_counts() -> Option<Vec<(String, usize)>> {
    type TakeCounts = unsafe extern "C" fn(*mut c_char, usize) -> usize;
    const NAME: &CStr = c"emulated_gpu_take_counts";
    // SAFETY: null stands for all libraries of the process; the name ends with a zero.
    let symbol = unsafe { dlsym(std::ptr::null_mut(), NAME.as_ptr()) };
    if symbol.is_null() {
        return None;
    }
    // SAFETY: this is the type of the function with this name (tests/emulated_gpu/src/count.rs).
    let take = unsafe { std::mem::transmute::<*mut c_void, TakeCounts>(symbol) };
    let mut text = vec![0u8; 1 << 16];
    // SAFETY: there is room for as many bytes.
    let length = unsafe { take(text.as_mut_ptr().cast(), text.len()) };
    let text = String::from_utf8(text[..length].to_vec()).unwrap();
    let count = |line: &str| line.split_once(' ').map(|(count, name)| (name.to_string(), count.parse().unwrap()));
    Some(text.lines().map(|line| count(line).unwrap()).collect())
}
