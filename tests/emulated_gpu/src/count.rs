//! Counts of what each thread has asked the GPU for, so that a test can hold upper bounds.
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::c_char;

thread_local! {
    static COUNTS: RefCell<BTreeMap<String, usize>> = RefCell::default();
}

/// The name under which allocations are counted.
pub(crate) const ALLOCATION: &str = "allocation";
/// The names of the host's waits: for all of a stream's work, so that it has none left afterwards, and for some of it, with the number of
/// operations that the stream still has. All other names are operations: work that a stream executes.
pub(crate) const WAIT: &str = "wait for all work";
pub(crate) const EARLY_WAIT: &str = "wait for earlier work";
/// The name of all calls for no bytes. No stream has work from them, but the host makes them.
const NOTHING: &str = "call for no bytes";

/// Counts a call of the current thread.
pub(crate) fn count(what: &str, bytes: usize) {
    let what = if bytes == 0 { NOTHING } else { what };
    // At the end of a thread, its counts may be gone already.
    let _gone = COUNTS.try_with(|counts| {
        let mut counts = counts.borrow_mut();
        match counts.get_mut(what) {
            Some(count) => *count += 1,
            None => drop(counts.insert(what.to_string(), 1)),
        }
    });
}

/// Ends the current thread's counts: writes a line "COUNT NAME" for each, up to `length` bytes in all, and returns the number of
/// bytes that there were to write.
///
/// # Safety
/// `text` must have room for `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn emulated_gpu_take_counts(text: *mut c_char, length: usize) -> usize {
    let lines: String = COUNTS.take().iter().map(|(name, count)| format!("{count} {name}\n")).collect();
    // SAFETY: guaranteed by the caller.
    unsafe { text.cast::<u8>().copy_from_nonoverlapping(lines.as_ptr(), lines.len().min(length)) };
    lines.len()
}
