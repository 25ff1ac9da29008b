//! Ranks as threads, or as processes if one of them dies; called through the functions that programs use.
mod collectives;
mod failures;
mod lifetimes;
mod messages;
mod processes;
mod support;

thread_local! {
    /// The last error of this thread's calls. That of the process may belong to another test.
    pub(super) static LAST_ERROR_HERE: std::cell::RefCell<String> = const { std::cell::RefCell::new(String::new()) };
}
