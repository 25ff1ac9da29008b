//! The one error type of the crate: what happened, where (rank, peer, parameter), why, and what to do.
use candle_core::{DType, Shape};
use std::fmt::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

/// The crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong, with the data a program needs to react.
///
/// `Debug` writes the same sentence as `Display`, since that is what is shown of an error that `main` returns.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// candle refused an operation.
    #[error(transparent)]
    Candle(candle_core::Error),

    /// The operating system refused something.
    #[error("{context}: {source}")]
    Io {
        /// What was being done, to what.
        context: String,
        /// The system's reason.
        source: std::io::Error,
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

    // Rendezvous
    /// An environment variable that is needed is not set.
    #[error("the environment variable {variable} is not set: {hint}")]
    MissingEnvironment {
        /// The variable's name.
        variable: &'static str,
        /// Who sets it, or what to use instead.
        hint: String,
    },

    /// An environment variable holds something that cannot be right.
    #[error("{variable}={value:?}: {reason}")]
    InvalidEnvironment {
        /// The variable's name.
        variable: String,
        /// Its value.
        value: String,
        /// What is wrong with it.
        reason: String,
    },

    /// A store did not answer, or a key was not set in time.
    #[error("{operation} timed out after {timeout:?} on the store {store}: {}", Printable(reason))]
    StoreTimeout {
        /// The operation, with its keys.
        operation: String,
        /// Where the store is.
        store: String,
        /// How long it was given.
        timeout: Duration,
        /// What is missing, and what usually causes it.
        reason: String,
    },

    /// A store answered with something else than its protocol allows, or refused.
    #[error("{operation} failed on the store {store}: {}", Printable(reason))]
    Store {
        /// The operation, with its keys.
        operation: String,
        /// Where the store is.
        store: String,
        /// Why.
        reason: String,
    },

    // Collectives
    /// A group whose ranks could not all be connected to each other.
    #[error("rank {rank} has no connection to rank(s) {peers:?} (time-out {timeout:?}): {}", Printable(reason))]
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

    /// Ranks called different collectives, or the same one with different arguments.
    #[error(
        "rank {rank_a} called {} where rank {rank_b} called {}, sequence {sequence}: \
         all ranks of a group must make the same calls in the same order",
        Printable(call_a),
        Printable(call_b)
    )]
    Desync {
        /// The group's sequence number of the call.
        sequence: u64,
        /// One of the ranks.
        rank_a: usize,
        /// What it called.
        call_a: String,
        /// The other rank.
        rank_b: usize,
        /// What that one called.
        call_b: String,
    },

    /// A peer's connection closed without a goodbye, as its process ended, and more was needed of it.
    #[error(
        "rank {peer} is gone: its connection to rank {rank} closed during {}. \
         Look for the first error in the output of rank {peer}",
        Printable(call)
    )]
    PeerGone {
        /// The rank that noticed.
        rank: usize,
        /// The rank whose process ended.
        peer: usize,
        /// What was going on.
        call: String,
    },

    /// A peer left the group in good order before it took part in a collective, or in a message.
    #[error(
        "rank {peer} left the group after sequence {left_after}, and cannot take part in {}, sequence {sequence}: \
         if rank {peer} failed, its output has the reason; otherwise make as many calls on all ranks of the group",
        Printable(call)
    )]
    PeerLeft {
        /// The rank that left.
        peer: usize,
        /// Its last collective, or message of this kind.
        left_after: u64,
        /// What the others are doing.
        call: String,
        /// The sequence number of it.
        sequence: u64,
    },

    /// A peer reported a failure of its own, which ends the group.
    #[error("rank {peer} ended the group: {}", Printable(reason))]
    PeerFailed {
        /// The rank that failed first.
        peer: usize,
        /// Its own error.
        reason: String,
    },

    /// A collective was not over within the group's time-out.
    #[error("rank {rank}: {call}, sequence {sequence}, timed out after {timeout:?}: {}", Printable(reason))]
    CollectiveTimeout {
        /// The rank that gave up.
        rank: usize,
        /// What it was doing.
        call: String,
        /// The group's sequence number of it.
        sequence: u64,
        /// The group's time-out.
        timeout: Duration,
        /// Whom it waited for, and what that rank was doing.
        reason: String,
    },

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

    /// A rank of `spawn` panicked or failed.
    #[error("rank {rank} failed: {}", Printable(reason))]
    RankFailed {
        /// The rank.
        rank: usize,
        /// Its panic message.
        reason: String,
    },

    // DistributedDataParallel
    /// Ranks hold different models.
    #[error("rank {rank} holds another model than rank 0: {}", Printable(difference))]
    ModelMismatch {
        /// The rank whose model differs.
        rank: usize,
        /// The first difference.
        difference: String,
    },

    /// Ranks registered different communication hooks.
    #[error("rank {rank} registered another communication hook than rank 0: {}", Printable(difference))]
    CommHookMismatch {
        /// The rank whose hook differs.
        rank: usize,
        /// The first difference.
        difference: String,
    },

    /// A backward pass that DDP did not start reached its gradient hooks.
    #[error(
        "the gradient of parameter {parameter} came out of a backward pass that DistributedDataParallel did not start, \
         so it would not be synchronised: call ddp.backward(&loss) and give its gradients to optimizer.step, \
         instead of loss.backward() or optimizer.backward_step(&loss). If this model is not to be trained, keep it out \
         with `let _frozen = ddp.freeze();` until the backward pass is over"
    )]
    BackwardOutsideDdp {
        /// The first parameter that was reached.
        parameter: String,
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

    /// A parameter that DDP cannot handle as asked.
    #[error("parameter {parameter}: {}", Printable(reason))]
    Parameter {
        /// The parameter's name.
        parameter: String,
        /// What is wrong, and what to do.
        reason: String,
    },

    // DataParallel
    /// A variable of a model for DataParallel is not on the first of its devices.
    #[error(
        "module must have its parameters and buffers on device {expected} (devices[0]) but found one of them on device: \
         {found}: {parameter}. Make the variables of the VarMap on {expected}, or give {found} as the first device"
    )]
    ParameterDevice {
        /// The variable's name.
        parameter: String,
        /// The first device.
        expected: String,
        /// Where the variable is.
        found: String,
    },

    /// A loss's target is not where DataParallel's outputs are.
    #[error(
        "the target is on device {found}, but DataParallel gathers its outputs on device {output_device}: move the target \
         with target.to_device(dp.output_device())?, or construct DataParallel with {found} as its output_device"
    )]
    TargetDevice {
        /// Where the target is.
        found: String,
        /// Where the outputs are.
        output_device: String,
    },

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

    /// A backward pass that DataParallel did not start reached its outputs.
    #[error(
        "a backward pass that DataParallel did not start reached its output, so that the parameters of its replicas would \
         get no gradients: call dp.backward(&loss) and give its gradients to optimizer.step, instead of loss.backward() \
         or optimizer.backward_step(&loss)"
    )]
    BackwardOutsideDataParallel,

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

    /// The launcher could not start the program.
    #[error("cannot start {program}: {source}. {hint}")]
    Program {
        /// The program, as it was given.
        program: String,
        /// The system's reason.
        source: std::io::Error,
        /// What to do.
        hint: String,
    },

    /// The launcher could not do its work.
    #[error("{0}")]
    Launch(String),
}

impl Error {
    /// An `Io` with its context.
    pub(crate) fn io(context: impl Into<String>, source: impl Into<std::io::Error>) -> Self {
        Self::Io { context: context.into(), source: source.into() }
    }

    pub(crate) fn invalid(argument: &'static str, reason: impl Into<String>) -> Self {
        Self::InvalidArgument { argument, reason: reason.into() }
    }

    pub(crate) fn parameter(parameter: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Parameter { parameter: parameter.into(), reason: reason.into() }
    }
}

/// Text that may come from the store or from a peer: control characters, with which it could drive a terminal or fake
/// lines of a log, are shown escaped. A line feed stays, as compilers' messages have several lines.
struct Printable<'a>(&'a str);

impl fmt::Display for Printable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|c| match c {
            '\n' | '\t' => f.write_char(c),
            c if c.is_control() => write!(f, "{}", c.escape_default()),
            c => f.write_char(c),
        })
    }
}

/// Whether the system has refused for want of something that may be there again in a moment: file descriptors, memory.
pub(crate) fn is_shortage(error: &std::io::Error) -> bool {
    use rustix::io::Errno;
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM))
}

/// What to do about a shortage.
pub(crate) const SHORTAGE_HINT: &str =
    "a process may have as many files and connections open as `ulimit -n` says: raise it, or find out who connects";

/// All sources are in the texts already.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
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

/// `f32[2, 3]`: how tensors are named in messages.
pub(crate) fn describe(dtype: DType, shape: &Shape) -> String {
    format!("{}{:?}", dtype.as_str(), shape.dims())
}

/// `; {what} (3): a, b, c` for each list that is not empty; long ones are cut.
fn list(lists: &[(&str, &[String])]) -> String {
    let mut text = String::new();
    for (what, names) in lists.iter().filter(|(_, names)| !names.is_empty()) {
        text += &format!("; {what} ({}): {}", names.len(), some(names));
    }
    text
}

/// `a, b, c`, or the first of very many.
pub(crate) fn some<S: std::borrow::Borrow<str>>(names: &[S]) -> String {
    const SHOWN: usize = 20;
    let text = names[..names.len().min(SHOWN)].join(", ");
    if names.len() > SHOWN { format!("{text} and {} more", names.len() - SHOWN) } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_peers_say_cannot_drive_a_terminal() {
        let reason = "line\nä\u{1b}]0;title\u{7} \u{9b}31m\r\tend".to_string();
        let error = Error::PeerFailed { peer: 1, reason };
        let text = "rank 1 ended the group: line\nä\\u{1b}]0;title\\u{7} \\u{9b}31m\\r\tend";
        assert_eq!(error.to_string(), text);
        assert_eq!(format!("{error:?}"), text);
    }

    #[test]
    fn what_main_shows_is_the_text() {
        let error = Error::MissingEnvironment { variable: "RANK", hint: "the launcher sets it".to_string() };
        assert_eq!(format!("{error:?}"), "the environment variable RANK is not set: the launcher sets it");
        let error = Error::io("reading x", std::io::Error::other("no such disk"));
        assert_eq!(format!("{error:?}"), "reading x: no such disk");
    }

    #[test]
    fn errors_come_out_of_candles_as_they_went_in() {
        let through = |error: Error| Error::from(candle_core::Error::from(error));
        let error = through(Error::RankOutOfRange { rank: 3, world_size: 2 });
        assert!(matches!(error, Error::RankOutOfRange { rank: 3, world_size: 2 }), "{error}");
        let ours = Error::invalid("eps", "it is negative");
        let text = ours.to_string();
        assert_eq!(candle_core::Error::from(ours).to_string(), text);

        // candle's own stay candle's.
        let missing = std::io::Error::from(std::io::ErrorKind::NotFound);
        let text = missing.to_string();
        for error in [Error::from(candle_core::Error::Io(missing)), through(candle_core::Error::msg(&text).into())] {
            assert!(matches!(&error, Error::Candle(_)) && error.to_string().starts_with(&text), "{error}");
        }
    }
}
