//! What tensors and kernels refuse.
use candle_core::{DType, Shape, Tensor};

/// The crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a function of this crate, or a layer that is made of them, refuses to work.
///
/// Layers return candle's errors, and this one travels in them unchanged: `From` gives it back. In `candle-ddp`, it becomes
/// the variant of the same name.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// candle refused an operation.
    #[error(transparent)]
    Candle(candle_core::Error),

    /// An argument that cannot be honoured.
    #[error("{argument}: {reason}")]
    InvalidArgument {
        /// The argument's or option's name.
        argument: &'static str,
        /// Why it cannot be honoured, and what would be.
        reason: String,
    },

    /// Something asked for was not compiled in, or does not exist in this version.
    #[error("{what} is not available: {hint}")]
    Unavailable {
        /// What was asked for.
        what: String,
        /// How to get it.
        hint: String,
    },

    /// A dtype that an operation has no kernel for.
    #[error("{operation} does not support dtype {dtype:?} (supported: {supported})")]
    UnsupportedDType {
        /// The operation.
        operation: String,
        /// The dtype that was given.
        dtype: DType,
        /// Those that work.
        supported: &'static str,
    },

    /// A CUDA kernel that could not be compiled, loaded or launched.
    #[error("CUDA kernels of {file}: {operation} failed: {reason}")]
    Kernel {
        /// The source.
        file: &'static str,
        /// What was being done.
        operation: String,
        /// Why: the compiler's messages, or the driver's.
        reason: String,
    },
}

impl Error {
    #[doc(hidden)]
    pub fn invalid(argument: &'static str, reason: impl Into<String>) -> Self {
        Self::InvalidArgument { argument, reason: reason.into() }
    }
}

/// An error of ours that went through candle's `Result` comes out as what it was.
impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        match error {
            candle_core::Error::Io(error) => {
                error.downcast().unwrap_or_else(|error| Self::Candle(candle_core::Error::Io(error)))
            }
            error => Self::Candle(error),
        }
    }
}

/// So that model code, which returns candle's `Result`, can use `?` on ours. It travels as an `io::Error` of kind `Other`:
/// that shows its text and gives it back, where candle's own `Wrapped` keeps the text only.
impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            error => candle_core::Error::Io(std::io::Error::other(error)),
        }
    }
}

/// `f32[2, 3]`: how tensors are named in messages.
#[doc(hidden)]
pub fn describe(dtype: DType, shape: &Shape) -> String {
    format!("{}{:?}", dtype.as_str(), shape.dims())
}

/// `f32[2, 3] on Cpu`: how tensors are named where their devices matter.
#[doc(hidden)]
pub fn describe_placed(tensor: &Tensor) -> String {
    format!("{} on {:?}", describe(tensor.dtype(), tensor.shape()), tensor.device().location())
}
