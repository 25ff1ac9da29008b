//! The crate's error type: what happened, where (rank, peer, parameter), why, and what to do.
mod context;
#[cfg(test)]
mod tests;
mod text;

pub(crate) use crate::tensor::error::describe;
#[doc(inline)]
pub use candle_ddp_rendezvous::Failure;
pub(crate) use candle_ddp_rendezvous::error::{GRADIENTS, RankError, SHORTAGE_HINT, is_shortage, ranks, some};
pub use context::Context;

use crate::{rendezvous, tensor};
use candle_core::DType;
use candle_ddp_rendezvous::error::Printable;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;
use text::{by_prefix, list, on_ranks, ranks_named, samples};

/// The crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong, with the data a program needs to react.
///
/// `Display` gives the whole message, which includes the cause. So only candle's own errors have a
/// [`source`](std::error::Error::source), and reports that follow sources, as those of `anyhow` do, repeat nothing.
/// `Debug` puts the variant's name before the message, for logs. This is also what Rust shows of an error that `main`
/// returns:
///
/// ```text
/// Error: PeerGone: rank 1 is gone: its connection to rank 0 closed during all_reduce(f32[3]). Look for …
/// ```
///
/// A group that has failed returns [`Error::Group`], whatever the reason was; make a new group to go on. After an
/// [`Error::InvalidArgument`], [`Error::InvalidTensor`], [`Error::RankFailed`] or [`Error::Mismatch`] the group is as good
/// as before.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// candle refused an operation.
    #[error(transparent)]
    Candle(candle_core::Error),

    /// The operating system refused something.
    #[error("{context}: {error}")]
    Io {
        /// What was being done, to what.
        context: String,
        /// The system's reason.
        error: std::io::Error,
    },

    /// An argument that cannot be honoured.
    #[error("{argument}: {}", Printable(reason))]
    InvalidArgument {
        /// The argument's or option's name.
        argument: &'static str,
        /// Why it cannot be honoured, and what would be.
        reason: String,
    },

    /// A rank outside of its group.
    #[error("rank {rank} is outside of a world of {world_size}: ranks go from 0 to world_size - 1")]
    RankOutOfRange {
        /// The rank that was given.
        rank: usize,
        /// The number of ranks in the group.
        world_size: usize,
    },

    /// Something asked for was not compiled in, or does not exist in this version.
    #[error("{what} is not available: {hint}")]
    Unavailable {
        /// What was asked for.
        what: String,
        /// How to get it.
        hint: String,
    },

    /// The ranks could not meet, or a store of theirs failed.
    #[error(transparent)]
    Rendezvous(rendezvous::Error),

    // Collectives
    /// A group whose ranks could not all be connected to each other.
    #[error("rank {rank} has no connection to rank(s) {} (time-out {timeout:?}): {}", ranks(peers), Printable(reason))]
    Connect {
        /// This rank.
        rank: usize,
        /// The ranks that it could not connect to.
        peers: Vec<usize>,
        /// How long the construction of the group was given.
        timeout: Duration,
        /// Why.
        reason: String,
    },

    /// A tensor that a collective cannot take.
    #[error("rank {rank}: {operation} cannot take this tensor: {reason}")]
    InvalidTensor {
        /// This rank.
        rank: usize,
        /// The collective.
        operation: String,
        /// Why, and what to do.
        reason: String,
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

    /// The group has failed, on all ranks: every later call returns the same. See [`Failure`].
    #[error(transparent)]
    Group(#[from] Failure),

    /// NCCL, or the CUDA driver under it, refused something while a group was being made.
    #[error(
        "rank {rank}: {operation} failed: {}. With NCCL_DEBUG=INFO in the environment NCCL says more",
        Printable(reason)
    )]
    Nccl {
        /// This rank.
        rank: usize,
        /// The function that failed.
        operation: String,
        /// Its reason.
        reason: String,
    },

    /// One rank failed in something that all ranks do together, such as building the model or saving a checkpoint, or
    /// a rank of `spawn` panicked. All ranks return this, except that the one that failed may return its own error.
    #[error("rank {rank} failed: {}", Printable(reason))]
    RankFailed {
        /// The rank.
        rank: usize,
        /// Its error or panic message.
        reason: String,
    },

    /// Some ranks did not come to a [`monitored_barrier`](crate::ProcessGroup::monitored_barrier). The group still works.
    #[error(
        "rank {rank}: rank(s) {} did not come to monitored_barrier within {timeout:?}: look for their first error, or \
         for what they do instead, in their output",
        ranks(missing)
    )]
    MonitoredBarrier {
        /// This rank.
        rank: usize,
        /// The ranks that are missing.
        missing: Vec<usize>,
        /// How long this rank waited.
        timeout: Duration,
    },

    // DistributedDataParallel
    /// A rank has no inputs left, while others have, in a [`join`](crate::DistributedDataParallel::join) that lets this end
    /// the loops of all. All ranks return the same, and the group still works.
    #[error(
        "rank {rank} has no inputs left, and other ranks have: with JoinOptions.throw_on_early_termination, this ends the \
         loops of all ranks"
    )]
    InputsExhausted {
        /// The lowest rank without inputs.
        rank: usize,
    },

    /// Ranks differ in something that must be the same on all of them, such as the model. All ranks return the same.
    #[error("the {what} of rank {rank} differs from that of rank 0: {}", Printable(difference))]
    Mismatch {
        /// What differs: `"model"`, `"communication hook"`, …
        what: &'static str,
        /// The first rank that differs from rank 0.
        rank: usize,
        /// The first difference.
        difference: String,
    },

    /// A backward pass that DistributedDataParallel or DataParallel did not start reached the model.
    #[error(
        "a backward pass that {wrapper} did not start reached {reached}: call its own method, as in \
         ddp.backward(&loss), and give the gradients to optimizer.step, instead of loss.backward() or \
         optimizer.backward_step(&loss). A DistributedDataParallel model that is not to be trained is kept out with \
         `let _frozen = ddp.freeze();` until the backward pass is over"
    )]
    BackwardOutside {
        /// `"DistributedDataParallel"` or `"DataParallel"`.
        wrapper: &'static str,
        /// What was reached first, and what would be lost.
        reached: String,
    },

    /// A backward pass of one DDP model would go through another, of which it was not told. Nothing has been sent.
    #[error(
        "the loss depends on {parameter} of another DistributedDataParallel model, whose gradients this backward pass \
         would not average: train both models with candle_ddp::backward(&loss, &[&a, &b]), or keep the other one's \
         parameters out with `let _frozen = b.freeze();` until the backward pass is over. Nothing was sent"
    )]
    OtherModelInGraph {
        /// The other model's name for its parameter.
        parameter: String,
    },

    /// Parameters of a DistributedDataParallel model that get no gradient, and so would never be trained. See
    /// [`DdpOptions::unused`](crate::DdpOptions::unused).
    #[error(
        "{} of {total} parameters get no gradient {}: {}. Either the loss does not depend on them, or it depends on them only \
         through an operation that has no backward pass: a detach, a multiplication by the number 0, or candle_nn's layer_norm, \
         rms_norm, softmax_last_dim or rope (candle_ddp::nn has the same with one; the package candle-ddp-nn under the name \
         candle-nn changes a whole program). If this is meant, as for experts or early exits, allow it with \
         DdpOptions.unused; variables that are not to be trained belong to DdpOptions.is_frozen",
        unused.len(),
        on_ranks(*rank),
        by_prefix(unused)
    )]
    UnusedParameters {
        /// The rank whose loss depends on no parameter of the model; nothing was sent, and the group has ended. None if no
        /// rank used the parameters in the first synchronised backward pass; all ranks return this, and the group still works.
        rank: Option<usize>,
        /// The names of the parameters.
        unused: Vec<String>,
        /// The number of the model's parameters.
        total: usize,
    },

    /// A parameter that DDP cannot handle as asked.
    #[error("parameter {parameter}: {}", Printable(reason))]
    Parameter {
        /// The parameter's name.
        parameter: String,
        /// What is wrong, and what to do.
        reason: String,
    },

    // Data
    /// A sample of a dataset that could not be read, or samples that could not be made into a batch.
    #[error("{}: {}", samples(indices), Printable(reason))]
    Samples {
        /// The sample's index in the dataset; of a batch, those of all its samples, in their order.
        indices: Vec<usize>,
        /// The error of the dataset or the collate function, or its panic message.
        reason: String,
    },

    // DataParallel
    /// A replica of DataParallel returned an error or panicked.
    #[error("replica {replica} on device {device} failed: {reason}")]
    Replica {
        /// The replica's number, which is its device's in the list of devices.
        replica: usize,
        /// Its device.
        device: String,
        /// Its error or panic message.
        reason: String,
    },

    /// A file or folder of a dataset that cannot be used.
    #[error("{}: {}", path.display(), Printable(reason))]
    DataFile {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong with it, and what to do.
        reason: String,
    },

    // Checkpoints
    /// A file that cannot be read as a checkpoint.
    #[error("{}: {reason}", path.display())]
    CheckpointFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it, and what to do.
        reason: String,
    },

    /// A checkpoint of another model.
    #[error("{} does not fit the model{}", path.display(), list(&[("missing from the file", missing), ("not in the model", unexpected), ("different", different)]))]
    CheckpointMismatch {
        /// The file.
        path: PathBuf,
        /// The model's variables that the file does not have.
        missing: Vec<String>,
        /// The file's tensors that the model has no variable for.
        unexpected: Vec<String>,
        /// Those that have another shape or kind of dtype: the name, what the file has, and what the model needs.
        different: Vec<String>,
    },

    /// A part of a checkpoint, or of an elastic run, that should be the same on all ranks.
    #[error(
        "the part {part:?} is not the same on all ranks: {} on {} differ from rank 0's. Reduce or broadcast what ranks have \
         computed for themselves. A part of which each rank has its own is saved as PerRank(part), random numbers with \
         seed::Generator::for_rank, and one of which rank 0's is good for all as RankZero(part)",
        some(names),
        ranks_named(ranks)
    )]
    PartDiffers {
        /// The name of the part.
        part: String,
        /// The ranks that have another state than rank 0.
        ranks: Vec<usize>,
        /// The tensors of the part that differ, sorted.
        names: Vec<String>,
    },

    /// A checkpoint does not have a part, or the part does not take over what was saved of it.
    #[error("the part {part:?} of the checkpoint {}: {error}", folder.display())]
    CheckpointPart {
        /// The checkpoint's folder.
        folder: PathBuf,
        /// The name of the part.
        part: String,
        /// Why it cannot be loaded.
        error: Box<Error>,
    },

    // Mixed precision
    /// A call of a gradient scaler in the wrong place of a training step.
    #[error("GradScaler::{call}: {reason}")]
    GradScaler {
        /// The method.
        call: &'static str,
        /// What is wrong, and what the right order is.
        reason: String,
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
    /// An `Io` with its context.
    pub(crate) fn io(context: impl Into<String>, error: impl Into<std::io::Error>) -> Self {
        Self::Io { context: context.into(), error: error.into() }
    }

    pub(crate) fn invalid(argument: &'static str, reason: impl Into<String>) -> Self {
        Self::InvalidArgument { argument, reason: reason.into() }
    }

    /// A `DataFile`.
    #[cfg(feature = "vision")]
    pub(crate) fn data_file(path: &std::path::Path, reason: impl Into<String>) -> Self {
        Self::DataFile { path: path.to_path_buf(), reason: reason.into() }
    }

    /// This error, of something that was made of a file.
    #[cfg(feature = "vision")]
    pub(crate) fn of_file(self, path: &std::path::Path) -> Self {
        Self::data_file(path, self.to_string())
    }

    pub(crate) fn parameter(parameter: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Parameter { parameter: parameter.into(), reason: reason.into() }
    }

    /// The failure of a group in this error, if there is one.
    pub(crate) fn failure(&self) -> Option<&Failure> {
        match self {
            Self::Group(failure) => Some(failure),
            _ => None,
        }
    }

    /// The rank because of which there is this error, as the group numbers it.
    fn culprit(&self) -> Option<usize> {
        match self {
            Self::Group(failure) => failure.culprit(),
            Self::Rendezvous(error) => error.culprit(),
            Self::RankFailed { rank, .. } => Some(*rank),
            Self::Connect { peers: ranks, .. } | Self::MonitoredBarrier { missing: ranks, .. } => {
                ranks.first().copied()
            }
            _ => None,
        }
    }

    /// This error as the launcher of `rank` gets it. `number` gives the launcher's number of a rank that the error names.
    pub(crate) fn of_rank(&self, rank: usize, number: impl Fn(usize) -> Option<usize>) -> RankError {
        RankError {
            rank,
            culprit: self.culprit().and_then(number).filter(|culprit| *culprit != rank),
            variant: self.name().to_string(),
            message: self.to_string(),
        }
    }

    /// The variant's name; of a group's failure or an error of the rendezvous, that of its reason.
    fn name(&self) -> &'static str {
        macro_rules! names {
            ($($variant:ident)+) => {
                match self {
                    Self::Group(failure) => failure.name(),
                    Self::Rendezvous(error) => error.name(),
                    $(Self::$variant { .. } => stringify!($variant),)+
                }
            };
        }
        names!(
            Candle Io InvalidArgument RankOutOfRange Unavailable Connect InvalidTensor UnsupportedDType Nccl RankFailed MonitoredBarrier InputsExhausted
            Mismatch BackwardOutside OtherModelInGraph UnusedParameters Parameter Samples Replica
            DataFile CheckpointFile CheckpointMismatch PartDiffers CheckpointPart GradScaler Kernel
        )
    }
}

impl From<rendezvous::Error> for Error {
    fn from(error: rendezvous::Error) -> Self {
        match error {
            rendezvous::Error::Io { context, error } => Self::Io { context, error },
            rendezvous::Error::InvalidArgument { argument, reason } => Self::InvalidArgument { argument, reason },
            rendezvous::Error::RankOutOfRange { rank, world_size } => Self::RankOutOfRange { rank, world_size },
            rendezvous::Error::Group(failure) => Self::Group(failure),
            rendezvous::Error::Cancelled(error) => match error.downcast() {
                Ok(error) => *error,
                Err(error) => Self::Rendezvous(rendezvous::Error::Cancelled(error)),
            },
            error => Self::Rendezvous(error),
        }
    }
}

/// For waits in a store that are cancelled.
impl From<Error> for rendezvous::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Rendezvous(error) => error,
            Error::Group(failure) => Self::Group(failure),
            error => Self::Cancelled(Box::new(error)),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {self}", self.name())
    }
}

impl From<tensor::Error> for Error {
    fn from(error: tensor::Error) -> Self {
        match error {
            tensor::Error::InvalidArgument { argument, reason } => Self::InvalidArgument { argument, reason },
            tensor::Error::Unavailable { what, hint } => Self::Unavailable { what, hint },
            tensor::Error::UnsupportedDType { operation, dtype, supported } => {
                Self::UnsupportedDType { operation, dtype, supported }
            }
            tensor::Error::Kernel { file, operation, reason } => Self::Kernel { file, operation, reason },
            tensor::Error::Candle(error) => error.into(),
            error => Self::Candle(error.into()),
        }
    }
}

/// An error of ours that went through candle's `Result` comes out as what it was.
impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        let candle_core::Error::Io(error) = error else { return Self::Candle(error) };
        match error.downcast::<Self>().or_else(|error| error.downcast::<tensor::Error>().map(Self::from)) {
            Ok(error) => error,
            Err(error) => Self::Candle(candle_core::Error::Io(error)),
        }
    }
}

/// So that model code, which speaks candle's `Result`, can use `?` on ours. It travels as an `io::Error` of kind `Other`:
/// that shows its text and gives it back, where candle's own `Wrapped` keeps the text only.
impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            error => candle_core::Error::Io(std::io::Error::other(error)),
        }
    }
}
