//! Errors that tests expect.
use std::fmt::Display;

/// Checks that a call has failed, and that its error has each of these texts.
#[track_caller]
pub fn assert_error<T>(result: Result<T, impl Display>, texts: &[&str]) {
    let error = result.err().expect("an error").to_string();
    for text in texts {
        assert!(error.contains(text), "{text:?} is not in {error}");
    }
}
