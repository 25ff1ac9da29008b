use super::mixed_precision::MixedPrecision;
use super::parameter::Role;
use crate::trace;
use crate::variables::{NamePredicate, is_batch_norm_buffer};
use candle_core::DType;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// The environment variable that turns [`DdpOptions::nan_check`] on.
const NAN_CHECK_VARIABLE: &str = "CANDLE_DDP_NAN_CHECK";

/// Options of DistributedDataParallel. All ranks must give the same.
///
/// PyTorch's `find_unused_parameters` and `static_graph` have no counterpart: ranks may use different parameters in every
/// step. [`unused`](Self::unused) is about parameters that no rank uses at all.
/// Gradients are always views of the buckets (`gradient_as_bucket_view`).
///
/// If several predicates select a variable, ignored takes precedence over buffer, and buffer over frozen.
#[derive(Clone)]
pub struct DdpOptions {
    /// The size in MiB of the gradients that are all-reduced together. 0 puts every parameter into a bucket of its own.
    /// Default: 25.
    pub bucket_cap_mb: f64,
    /// The size in MiB of the first bucket, which is smaller so that communication begins early. Default: 1.
    pub first_bucket_mb: f64,
    /// Whether all ranks take rank 0's buffers, such as running means, in every synchronised backward pass, so that
    /// they are equal before the next forward pass, as in PyTorch. Default: true.
    pub broadcast_buffers: bool,
    /// Which variables are frozen, as by PyTorch's `requires_grad_(False)` before the model is wrapped. At construction
    /// all ranks take rank 0's values; after that, frozen variables are not sent. They are not among the
    /// [`parameters`](crate::DistributedDataParallel::parameters), so optimizers do not get them, and candle's backward
    /// pass skips what depends on nothing else. Buffers stay buffers. To thaw variables, rebuild DDP and the optimizer
    /// from the same `VarMap`. Default: none.
    pub is_frozen: NamePredicate,
    /// Which variables are buffers in addition to those of batch norms: they have no gradient, and the model gets the
    /// variables themselves. Variables of integer type are always buffers. Default: none.
    pub is_buffer: NamePredicate,
    /// Whether variables whose names end in `running_mean`, `running_var` or `num_batches_tracked` are buffers, whatever
    /// `is_buffer` says. Default: true. With false, `is_buffer` alone decides.
    pub batch_norm_buffers: bool,
    /// Which variables DDP leaves alone: they are neither broadcast nor averaged, the model gets the variables
    /// themselves, and `backward` returns this rank's own gradients for them. Default: none.
    pub is_ignored: NamePredicate,
    /// Which parameters may get no gradient on any rank in the first synchronised backward pass. Default: none; a parameter
    /// without a gradient is [`Error::UnusedParameters`](crate::Error::UnusedParameters) on every rank.
    pub unused: Unused,
    /// Lower precision for the model's computation or for sending gradients (see [`amp`](crate::amp)). Default: None.
    pub mixed_precision: Option<MixedPrecision>,
    /// The seed for initial values of variables that are not in the VarMap yet, which makes them reproducible (see
    /// [`seed::init`](crate::seed::init())). Default: None, and candle's generator draws them. In both cases all ranks
    /// start with rank 0's values.
    pub init_seed: Option<u64>,
    /// The folder for a timeline of the training steps, with one file per rank (see [`trace`](crate::trace)). Default:
    /// the folder in the environment variable `CANDLE_DDP_TRACE`, if set; otherwise there is no tracing and no cost.
    pub trace: Option<PathBuf>,
    /// Whether a gradient with an infinity or a NaN is an error, on every rank, that names the rank and the parameter:
    /// PyTorch's `TORCH_NCCL_NAN_CHECK`. Every bucket is checked before it is sent, which on a GPU waits for the gradients
    /// in it. Do not use it with a [`GradScaler`](crate::GradScaler), which expects infinities. When it is off, it costs
    /// nothing. Default: whether the environment variable `CANDLE_DDP_NAN_CHECK` is set to something other than `0`.
    pub nan_check: bool,
}

impl Default for DdpOptions {
    fn default() -> Self {
        Self {
            bucket_cap_mb: 25.0,
            first_bucket_mb: 1.0,
            broadcast_buffers: true,
            is_frozen: Arc::new(|_| false),
            is_buffer: Arc::new(|_| false),
            batch_norm_buffers: true,
            is_ignored: Arc::new(|_| false),
            unused: Unused::default(),
            mixed_precision: None,
            init_seed: None,
            trace: std::env::var_os(trace::FOLDER_VARIABLE).map(PathBuf::from),
            nan_check: std::env::var_os(NAN_CHECK_VARIABLE).is_some_and(|value| !value.is_empty() && value != "0"),
        }
    }
}

impl DdpOptions {
    pub(super) fn role(&self, name: &str, dtype: DType) -> Role {
        let is_buffer = || (self.is_buffer)(name) || (self.batch_norm_buffers && is_batch_norm_buffer(name));
        if (self.is_ignored)(name) {
            Role::Ignored
        } else if !dtype.is_float() || is_buffer() {
            Role::Buffer
        } else if (self.is_frozen)(name) {
            Role::Frozen
        } else {
            Role::Parameter
        }
    }
}

impl fmt::Debug for DdpOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DdpOptions")
            .field("bucket_cap_mb", &self.bucket_cap_mb)
            .field("first_bucket_mb", &self.first_bucket_mb)
            .field("broadcast_buffers", &self.broadcast_buffers)
            .field("batch_norm_buffers", &self.batch_norm_buffers)
            .field("unused", &self.unused)
            .field("mixed_precision", &self.mixed_precision)
            .field("init_seed", &self.init_seed)
            .field("trace", &self.trace)
            .field("nan_check", &self.nan_check)
            .finish_non_exhaustive()
    }
}

/// Which parameters the loss need not depend on. Frozen, buffer and ignored variables are no parameters here.
///
/// A parameter that stays without a gradient is never trained, and nothing else shows it: often an operation between it and
/// the loss has no backward pass in candle. So it is an error unless the program expects it. Parameters are checked in the
/// first synchronised backward pass, with gradients accumulated under `no_sync` before it. Later passes may leave out any
/// parameter. On every rank, the loss must depend on some
/// parameter in every pass, unless all are allowed to be unused.
#[derive(Clone, Default)]
pub enum Unused {
    /// None may be unused.
    #[default]
    Refuse,
    /// Any may be unused, as with PyTorch's `find_unused_parameters=True`.
    Allow,
    /// Those whose full names fulfil the predicate may be unused: experts of a mixture, or the heads of early exits.
    AllowNames(NamePredicate),
}

impl Unused {
    pub(super) fn allows(&self, name: &str) -> bool {
        match self {
            Self::Refuse => false,
            Self::Allow => true,
            Self::AllowNames(predicate) => predicate(name),
        }
    }
}

impl fmt::Debug for Unused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Refuse => "Refuse",
            Self::Allow => "Allow",
            Self::AllowNames(_) => "AllowNames(..)",
        })
    }
}
