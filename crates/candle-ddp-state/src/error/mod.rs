//! The error type of `candle-ddp`: what happened, where (rank, peer, parameter), why, and what to do.
mod cause;
mod context;
mod convert;
#[cfg(test)]
mod tests;
mod text;

pub use crate::tensor::error::describe;
pub use candle_ddp_base::text::{ranks, some};
#[doc(inline)]
pub use candle_ddp_rendezvous::Failure;
pub use candle_ddp_rendezvous::error::{GRADIENTS, RankError};
pub use context::Context;

use crate::rendezvous;
use candle_core::DType;
use candle_ddp_base::text::Printable;
use candle_ddp_rendezvous::error::others;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;
use text::{by_prefix, list, non_finite, on_ranks, ranks_named, samples, steps, without_samples};

/// The result of `candle-ddp`'s functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong, with the data a program needs to react.
///
/// `Display` gives the whole message, which includes the cause. So only candle's own errors have a
/// [`source`](std::error::Error::source), and reports that follow sources, such as `anyhow`'s, repeat nothing.
/// `Debug` puts the variant's name before the message, for logs. Rust also shows this form of an error that `main`
/// returns:
///
/// ```text
/// Error: PeerGone: rank 1 is gone: its connection to rank 0 closed during all_reduce(f32[3]). Look for …
/// ```
///
/// A group that has failed returns [`Error::Group`], whatever the reason was; make a new group to continue. After an
/// [`Error::InvalidArgument`], [`Error::InvalidTensor`], [`Error::RankFailed`] or [`Error::Mismatch`], the group still
/// works.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// candle refused an operation.
    #[error(transparent)]
    Candle(candle_core::Error),

    /// The operating system refused something.
    #[error("{context}: {error}")]
    Io {
        /// The operation and its object.
        context: String,
        /// The system's reason.
        error: std::io::Error,
    },

    /// An invalid argument.
    #[error("{argument}: {}", Printable(reason))]
    InvalidArgument {
        /// The argument's or option's name.
        argument: &'static str,
        /// The reason why it is invalid, and what would be valid.
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
        /// The thing that was asked for.
        what: String,
        /// How to get it.
        hint: String,
    },

    /// The ranks could not meet, or their store failed.
    #[error(transparent)]
    Rendezvous(rendezvous::Error),

    // Collectives
    /// A group whose ranks could not all be connected to each other.
    #[error("rank {rank} has no connection to {} (time-out {timeout:?}): {}", others(peers), Printable(reason))]
    Connect {
        /// This rank.
        rank: usize,
        /// The ranks that it could not connect to; empty if it is unknown which.
        peers: Vec<usize>,
        /// The time-out of the group's construction.
        timeout: Duration,
        /// The reason.
        reason: String,
    },

    /// A tensor that a collective cannot take.
    #[error("rank {rank}: {operation} cannot take this tensor: {reason}")]
    InvalidTensor {
        /// This rank.
        rank: usize,
        /// The collective.
        operation: String,
        /// The reason, and the remedy.
        reason: String,
    },

    /// A dtype that an operation has no kernel for.
    #[error("{operation} does not support dtype {dtype:?} (supported: {supported}): convert the tensor with to_dtype")]
    UnsupportedDType {
        /// The operation.
        operation: String,
        /// The dtype that was given.
        dtype: DType,
        /// The supported dtypes.
        supported: &'static str,
    },

    /// The group has failed, on all ranks: every later call returns the same. See [`Failure`].
    #[error(transparent)]
    Group(#[from] Failure),

    /// NCCL, or the CUDA driver below it, failed while a group was being made.
    #[error(
        "rank {rank}: {operation} failed: {}. Set NCCL_DEBUG=INFO in the environment for details from NCCL",
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

    /// An engine outside this crate failed while a group was being made.
    #[error("rank {rank}: {operation} failed: {}", Printable(reason))]
    Engine {
        /// This rank.
        rank: usize,
        /// The function of the engine's library that failed.
        operation: String,
        /// Its reason, and what to do.
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

    /// Some ranks did not come to a `ProcessGroup::monitored_barrier`. The group still works.
    #[error(
        "rank {rank}: rank(s) {} did not come to monitored_barrier within {timeout:?}: look in their output for their \
         first error, or for what they do instead",
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
    /// A rank has no inputs left while others still have some, in a `DistributedDataParallel::join` whose
    /// options let this end the loops of all. All ranks return the same error, and the group still works.
    #[error(
        "rank {rank} has no inputs left, but other ranks have some: with JoinOptions.throw_on_early_termination, this \
         ends the loops of all ranks"
    )]
    InputsExhausted {
        /// The lowest rank without inputs.
        rank: usize,
    },

    /// Ranks differ in something that must be the same on all of them, such as the model. All ranks return the same
    /// error.
    #[error(
        "the {what} of rank {rank} differs from that of other ranks: {}. All ranks must have the same one: it may depend on the \
         rank, on a file that differs between hosts, or on the program's version",
        Printable(difference)
    )]
    Mismatch {
        /// What differs: `"model"`, `"communication hook"`, …
        what: &'static str,
        /// The first rank that differs from most ranks, or from rank 0 if there is no majority.
        rank: usize,
        /// The first difference.
        difference: String,
    },

    /// A backward pass that DistributedDataParallel or DataParallel did not start reached the model.
    #[error(
        "a backward pass that {wrapper} did not start reached {reached}: call its own method, as in \
         ddp.backward(&loss), and give the gradients to optimizer.step, instead of loss.backward() or \
         optimizer.backward_step(&loss). To keep a DistributedDataParallel model out of the training, hold \
         `let _frozen = ddp.freeze();` until the backward pass is over"
    )]
    BackwardOutside {
        /// `"DistributedDataParallel"` or `"DataParallel"`.
        wrapper: &'static str,
        /// The part of the model that was reached first, and what would be lost.
        reached: String,
    },

    /// A backward pass of one DDP model would go through another, which the call does not name. Nothing has been sent.
    #[error(
        "the loss depends on {parameter} of another DistributedDataParallel model, whose gradients this backward pass \
         would not average: train both models with backward_with(&loss, &[&a, &b], Backward::default()), or keep the other one's \
         parameters out by holding `let _frozen = b.freeze();` until the backward pass is over. Nothing was sent"
    )]
    OtherModelInGraph {
        /// The other model's name for its parameter.
        parameter: String,
    },

    /// The graph of a loss contains a tensor that was computed before a parameter of a DistributedDataParallel model changed, such
    /// as the state of an LSTM that an earlier step computed. The backward pass would compute gradients with the new values;
    /// PyTorch refuses this as well. Nothing has been sent.
    #[error(
        "the loss depends on a tensor that an earlier step computed with the old values of {parameter}, such as the state of a \
         recurrent layer: carry `state.detach()` into the next step, so that its graph ends there"
    )]
    StaleGraph {
        /// The name of a parameter that has changed since.
        parameter: String,
    },

    /// Some parameters of a DistributedDataParallel model get no gradient, and so would never be trained. See
    /// `DdpOptions::unused`.
    #[error(
        "{} of {total} parameters get no gradient {}: {}. Either the loss does not depend on them, or it depends on \
         them only through an operation that has no backward pass: a detach, no_grad, a multiplication by the number 0, a gradient \
         out of a GradStore, or candle_nn's layer_norm, rms_norm, softmax_last_dim or rope (candle_ddp::nn has the same with one; the package \
         candle-ddp-nn under the name candle-nn changes a whole program). If this is meant, as for experts or early \
         exits, allow it with DdpOptions.unused; exclude variables that must not be trained with DdpOptions.role{}",
        unused.len(),
        on_ranks(*rank),
        by_prefix(unused),
        without_samples(*rank)
    )]
    UnusedParameters {
        /// The rank whose loss depends on no parameter of the model; nothing was sent, and the group has ended. `None`
        /// if no rank used the parameters in the first synchronised backward pass; then all ranks return this error,
        /// and the group still works.
        rank: Option<usize>,
        /// The names of the parameters.
        unused: Vec<String>,
        /// The number of the model's parameters.
        total: usize,
    },

    /// The counts that all ranks gave in `Backward::count` add up to
    /// nothing that gradients can be divided by. All ranks return this error, and the group still works.
    #[error(
        "the counts of all ranks in the backward pass add up to {total}, so there is no mean: skip this step, on all ranks, if \
         no rank has anything to count, or give the count of what loss_sum is a sum over"
    )]
    NothingCounted {
        /// The sum of the counts, with those accumulated under `no_sync`.
        total: f64,
    },

    /// A step that must not be made, since its gradients or a loss are not finite: see `OnNonFinite`. All ranks
    /// return this error, and the group still works.
    #[error("{}", non_finite(parameter.as_deref(), *rank, value, *steps))]
    NonFinite {
        /// The first parameter whose gradient is not finite; None if it is the loss.
        parameter: Option<String>,
        /// The rank that had it; None if the gradients of each rank are finite, and their mean is not.
        rank: Option<usize>,
        /// The value, such as `a NaN`.
        value: String,
        /// The number of such steps in a row, with this one.
        steps: u64,
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
    /// A sample of a dataset could not be read, or samples could not be made into a batch.
    #[error("{}: {}", samples(indices), Printable(reason))]
    Samples {
        /// The sample's index in the dataset; for a batch, the indices of all its samples, in order.
        indices: Vec<usize>,
        /// The error of the dataset or the collate function, or its panic message.
        reason: String,
    },

    /// A worker of a `DataLoader` has not returned in time: see `LoaderOptions::timeout`. The batch is left out; those after it can
    /// be read while other workers are left. The group still works, but the other ranks may wait for this one.
    #[error(
        "rank {rank}: its DataLoader got no batch in {timeout:?}: {}. The disk or the decoder behind worker {worker} may be stuck; if \
         sample {index} is only slow, give the loader more workers, or a longer LoaderOptions.timeout",
        Printable(activity)
    )]
    LoaderTimedOut {
        /// This rank.
        rank: usize,
        /// The number of the worker thread, from 0 to `num_workers` - 1.
        worker: usize,
        /// The index in the dataset of the sample that it reads, or of the first one in the batch that it makes.
        index: usize,
        /// How long the rank has waited for the batch.
        timeout: Duration,
        /// The work of the workers for this batch, and since when.
        activity: String,
    },

    // DataParallel
    /// A replica of DataParallel returned an error or panicked.
    #[error("replica {replica} on device {device} failed: {reason}")]
    Replica {
        /// The replica's number: its device's position in the list of devices.
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
    #[error(
        "{} does not fit the model{}. Build the model that saved it, or load what fits with `checkpoint::load_with` \
         and LoadOptions: `rename` maps names, `skip` leaves variables as they are, and without `strict` only the names that both have are loaded",
        path.display(),
        list(&[("missing from the file", missing), ("not in the model", unexpected), ("different", different)])
    )]
    CheckpointMismatch {
        /// The file.
        path: PathBuf,
        /// The model's variables that are not in the file.
        missing: Vec<String>,
        /// The file's tensors for which the model has no variable.
        unexpected: Vec<String>,
        /// The tensors with another shape or kind of dtype: the name, what the file has, and what the model needs.
        different: Vec<String>,
    },

    /// The ranks' models have parted: see `ReplicaCheck`.
    #[error(
        "the models of the ranks are no longer the same: after {passes} synchronised backward passes, {} on {} {} from other ranks'. All \
         ranks must make the same optimizer steps, with the same options and learning rate, and only with the gradients of a \
         synchronised pass; load the same file on all ranks, or none; and let all ranks decide together what they skip. If all do, \
         the memory of a host may be faulty. DdpOptions::replica_check says when models are compared",
        some(names),
        ranks_named(ranks),
        if names.len() == 1 { "differs" } else { "differ" }
    )]
    ReplicasDiffer {
        /// The ranks whose variables differ from those of most ranks, or from rank 0's if no values have a majority; of two ranks, both.
        ranks: Vec<usize>,
        /// The variables that differ, sorted; also `the optimizer's options` and `the optimizer's number of steps`.
        names: Vec<String>,
        /// The number of synchronised backward passes of the model.
        passes: u64,
    },

    /// A part of a checkpoint, or of an elastic run, that should be the same on all ranks.
    #[error(
        "the part {part:?} is not the same on all ranks: {} on {} {} from other ranks'. Reduce or broadcast values \
         that ranks have computed separately. Use PerRank(part) if each rank has its own, which as many ranks can load, \
         RankZero(part) if rank 0's serves all ranks, and seed::Generator::for_rank for random numbers",
        some(names),
        ranks_named(ranks),
        if names.len() == 1 { "differs" } else { "differ" }
    )]
    PartDiffers {
        /// The name of the part.
        part: String,
        /// The ranks whose state differs from most ranks' state, or from rank 0's if no state has a majority; of two ranks, both.
        ranks: Vec<usize>,
        /// The tensors of the part that differ, sorted.
        names: Vec<String>,
    },

    /// A checkpoint does not have a part, or the part cannot load its saved state.
    #[error("the part {part:?} of the checkpoint {}: {error}", folder.display())]
    CheckpointPart {
        /// The checkpoint's folder.
        folder: PathBuf,
        /// The name of the part.
        part: String,
        /// The reason why it cannot be loaded.
        error: Box<Error>,
    },

    /// A schedule that a run of another length has saved: see `optim::OnOtherLength`.
    #[error(
        "the schedule {schedule} was saved with {option} {}, and the program makes it with {}: with another number of ranks, other data or \
         another batch size, an epoch has another number of steps. Say how the run continues with `on_other_length`: OnOtherLength::Keep \
         goes on as it was planned when it was saved, OnOtherLength::Stretch goes on with the program's length from the same fraction of \
         it, and OnOtherLength::New with the program's length from the saved step",
        steps(saved),
        steps(made)
    )]
    OtherLength {
        /// The schedule's name.
        schedule: &'static str,
        /// The first option that differs, such as `total_steps`.
        option: &'static str,
        /// Its value in the state, in calls of `LrScheduler::step`; several for `milestones`.
        saved: Vec<u64>,
        /// The program's value.
        made: Vec<u64>,
    },

    // Mixed precision
    /// A call of a gradient scaler in the wrong place of a training step.
    #[error("GradScaler::{call}: {reason}")]
    GradScaler {
        /// The method.
        call: &'static str,
        /// What is wrong, and the right order.
        reason: String,
    },

    /// A CUDA kernel that could not be compiled, loaded or launched.
    #[error("CUDA kernels of {file}: {operation} failed: {reason}")]
    Kernel {
        /// The source.
        file: &'static str,
        /// The operation.
        operation: String,
        /// The compiler's messages, or the driver's.
        reason: String,
    },
}

#[doc(hidden)]
impl Error {
    /// An `Io` with its context.
    pub fn io(context: impl Into<String>, error: impl Into<std::io::Error>) -> Self {
        Self::Io { context: context.into(), error: error.into() }
    }

    /// An `InvalidArgument`.
    pub fn invalid(argument: &'static str, reason: impl Into<String>) -> Self {
        Self::InvalidArgument { argument, reason: reason.into() }
    }

    /// A `Parameter`.
    pub fn parameter(parameter: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Parameter { parameter: parameter.into(), reason: reason.into() }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {self}", self.name())
    }
}
