//! Errors of the operating system, with the operation that failed.
use super::{Error, Result};
use std::fmt::Display;
use std::io;

/// Turns an error of the standard library into an [`Error::Io`] that names the failed operation.
///
/// ```
/// use candle_ddp::Context;
///
/// fn open(path: &str) -> candle_ddp::Result<std::fs::File> {
///     std::fs::File::open(path).with_context(|| format!("opening {path}"))
/// }
/// let error = open("/nowhere/data").unwrap_err().to_string();
/// assert!(error.starts_with("opening /nowhere/data: "), "{error}");
/// ```
pub trait Context<T> {
    /// `context` names the operation and its object: "reading labels.csv".
    ///
    /// # Errors
    /// [`Error::Io`].
    fn context(self, context: impl Display) -> Result<T>;

    /// Like [`context`](Self::context), but builds the text only if there is an error.
    ///
    /// # Errors
    /// [`Error::Io`].
    fn with_context<C: Display>(self, context: impl FnOnce() -> C) -> Result<T>;
}

impl<T> Context<T> for io::Result<T> {
    fn context(self, context: impl Display) -> Result<T> {
        self.with_context(|| context)
    }

    fn with_context<C: Display>(self, context: impl FnOnce() -> C) -> Result<T> {
        self.map_err(|error| Error::io(context().to_string(), error))
    }
}
