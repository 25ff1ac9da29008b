//! The errors of tensors and kernels.
use candle_core::{CpuStorage, DType, Shape, Tensor};
use candle_ddp_env::Invalid;

/// The crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The reason why a function of this crate, or a layer made of these functions, fails.
///
/// Layers return candle's errors, and this one travels in them unchanged: `From` gives it back. In `candle-ddp`, it becomes
/// the variant of the same name, and `Base` becomes the variant of the error in it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// candle refused an operation.
    #[error(transparent)]
    Candle(candle_core::Error),

    /// An error that every crate has, such as an invalid argument.
    #[error(transparent)]
    Base(#[from] candle_ddp_base::Error),

    /// A dtype for which an operation has no kernel.
    #[error("{operation} does not support dtype {dtype:?} (supported: {supported}): convert the tensor with to_dtype")]
    UnsupportedDType {
        /// The operation.
        operation: String,
        /// The dtype of the tensor.
        dtype: DType,
        /// The supported dtypes.
        supported: &'static str,
    },

    /// A CUDA kernel that could not be compiled, loaded or launched.
    #[error("CUDA kernels of {file}: {operation} failed: {reason}")]
    Kernel {
        /// The source.
        file: &'static str,
        /// The operation that failed.
        operation: String,
        /// The messages of the compiler or the driver.
        reason: String,
    },
}

impl Error {
    #[doc(hidden)]
    pub fn invalid(argument: &'static str, reason: impl Into<String>) -> Self {
        candle_ddp_base::Error::invalid(argument, reason).into()
    }
}

#[doc(hidden)]
impl From<Invalid> for Error {
    fn from(Invalid { variable, value, reason }: Invalid) -> Self {
        Self::invalid(variable, format!("{value:?}: {reason}"))
    }
}

/// An error of this crate that went through candle's `Result` comes out unchanged, and one about a parameter of a sharded model that has
/// no memory says so.
impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        match error {
            candle_core::Error::Io(error) => {
                error.downcast().unwrap_or_else(|error| Self::Candle(candle_core::Error::Io(error)))
            }
            error => match refused_by(&error) {
                Some(operation) => gone(&format!("an argument of candle's {operation} is one")),
                None => Self::Candle(error),
            },
        }
    }
}

/// Lets model code, which returns candle's `Result`, use `?` on errors of this crate. They travel as an `io::Error` of kind `Other`,
/// which shows their text and returns them; candle's own `Wrapped` keeps only the text.
impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            error => candle_core::Error::Io(std::io::Error::other(error)),
        }
    }
}

/// The dtype of a storage that [`hold`](crate::hold) has released. Neither candle nor this project computes with it, so that every use of
/// the tensor, whose own dtype stays, is an error instead of a read of memory that is not there.
pub(crate) const RELEASED: DType = DType::F6E2M3;

/// Refuses a storage that was released.
pub(crate) fn check_storage(storage: &CpuStorage) -> Result<()> {
    match storage {
        CpuStorage::F6E2M3(owner) => Err(gone(&format!("it belongs to {}", String::from_utf8_lossy(owner)))),
        _ => Ok(()),
    }
}

/// The error for a use of a tensor whose memory was released.
pub(crate) fn gone(which: &str) -> Error {
    let reason = format!(
        "{which}, and has no values here. The parameters of a block exist only while the block computes, those outside of blocks from a \
         forward pass to the end of its backward pass, and under no_grad during the call of the model. Compute with them \
         inside of `block.call(…)` and `ddp.call(…)`, and let `ddp.call` return `weight.copy()?` instead of a weight"
    );
    Error::invalid("a parameter of a sharded model", reason)
}

/// The operation of candle that refused a released storage, if that is what `error` says.
pub(crate) fn refused_by(error: &candle_core::Error) -> Option<&'static str> {
    use candle_core::Error::{
        Context, DTypeMismatchBinaryOp, UnexpectedDType, UnsupportedDTypeForOp, WithBacktrace, WithPath,
    };
    match error {
        DTypeMismatchBinaryOp { lhs, rhs, op } => [lhs, rhs].contains(&&RELEASED).then_some(op),
        UnexpectedDType { got, .. } => (*got == RELEASED).then_some("a look at its values"),
        UnsupportedDTypeForOp(dtype, op) => (*dtype == RELEASED).then_some(op),
        Context { inner, .. } | WithBacktrace { inner, .. } | WithPath { inner, .. } => refused_by(inner),
        _ => None,
    }
}

/// The error for a dtype that is none of [`Element`](crate::Element)'s.
pub fn unsupported(operation: &str, dtype: DType) -> Error {
    match dtype {
        RELEASED => gone(&format!("an argument of {operation} is one")),
        _ => Error::UnsupportedDType { operation: operation.to_string(), dtype, supported: "f32, f64, f16, bf16" },
    }
}

/// Describes a tensor in messages: `f32[2, 3]`.
pub fn describe(dtype: DType, shape: &Shape) -> String {
    format!("{}{:?}", dtype.as_str(), shape.dims())
}

/// Describes a tensor in messages in which its device matters: `f32[2, 3] on Cpu`.
pub fn describe_placed(tensor: &Tensor) -> String {
    format!("{} on {:?}", describe(tensor.dtype(), tensor.shape()), tensor.device().location())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    #[test]
    fn errors_come_out_of_candles_as_what_they_were() {
        use candle_ddp_base::Error as Base;
        let travelled = |error: Error| Error::from(candle_core::Error::from(error));
        let error = travelled(Base::data_file("1.jpg", "it is a FIFO").into());
        assert!(
            matches!(&error, Error::Base(Base::DataFile { .. })) && error.to_string() == "1.jpg: it is a FIFO",
            "{error:?}"
        );
        let error = travelled(Error::invalid("size", "0"));
        assert!(matches!(&error, Error::Base(Base::InvalidArgument { argument: "size", .. })), "{error:?}");
        let error = Error::from(candle_core::Error::from(io::Error::other("no such disk")));
        assert!(matches!(&error, Error::Candle(candle_core::Error::Io(_))), "{error:?}");
    }
}
