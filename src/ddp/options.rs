use super::mixed_precision::MixedPrecision;
use super::parameter::Role;
use crate::tensor::variables::{NamePredicate, is_batch_norm_buffer};
use crate::trace;
use candle_core::DType;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// How DistributedDataParallel works. All ranks give the same.
///
/// PyTorch's `find_unused_parameters` and `static_graph` have no counterpart: unused parameters always work. Gradients
/// always are views of the buckets (`gradient_as_bucket_view`).
///
/// Where several of the predicates choose a variable, it is ignored before it is a buffer, and a buffer before it is
/// frozen.
#[derive(Clone)]
pub struct DdpOptions {
    /// How many MiB of gradients are all-reduced together. Default: 25. 0 puts every parameter into a bucket of its own.
    pub bucket_cap_mb: f64,
    /// The size in MiB of the first bucket, which is smaller so that communication begins early. Default: 1.
    pub first_bucket_mb: f64,
    /// Whether all ranks take over rank 0's buffers, such as running means, in every synchronised backward pass: so
    /// that they are equal before the next forward pass, as in PyTorch. Default: true.
    pub broadcast_buffers: bool,
    /// Which variables are frozen, as by PyTorch's `requires_grad_(False)` before the model is wrapped: at construction
    /// all ranks take over rank 0's values, and then nothing is sent of them. They are not among
    /// [`parameters`](crate::DistributedDataParallel::parameters), so that no optimizer gets them, and candle's backward
    /// pass leaves out what depends on nothing else. Buffers stay buffers. To thaw them, build DDP and the optimizer
    /// anew from the same `VarMap`. Default: none.
    pub is_frozen: NamePredicate,
    /// Which variables are buffers beside those of batch norms: without a gradient, and handed to the model as they are.
    /// Variables of integer type always are. Default: none.
    pub is_buffer: NamePredicate,
    /// Whether variables whose names end in `running_mean`, `running_var` or `num_batches_tracked` are buffers, whatever
    /// `is_buffer` says. Default: true. With false, `is_buffer` alone decides.
    pub batch_norm_buffers: bool,
    /// Which variables DDP leaves alone: neither broadcast nor averaged, handed to the model as they are; their
    /// gradients come out of `backward` as this rank's own. Default: none.
    pub is_ignored: NamePredicate,
    /// Lower precision for the model's calculations, or for sending gradients (see [`amp`](crate::amp)). Default: none.
    pub mixed_precision: Option<MixedPrecision>,
    /// The seed of the values with which variables are made that are not in the VarMap yet, so that they can be repeated
    /// (see [`seed::init`](crate::seed::init())). Default: none, and candle's generator makes them. All ranks start with
    /// rank 0's values in both cases.
    pub init_seed: Option<u64>,
    /// The folder for a time line of the training steps, a file for each rank (see [`trace`](crate::trace)). Default: the
    /// one that the environment variable `CANDLE_DDP_TRACE` names, if any; without, tracing costs nothing.
    pub trace: Option<PathBuf>,
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
            mixed_precision: None,
            init_seed: None,
            trace: std::env::var_os(trace::FOLDER_VARIABLE).map(PathBuf::from),
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
            .field("mixed_precision", &self.mixed_precision)
            .field("init_seed", &self.init_seed)
            .field("trace", &self.trace)
            .finish_non_exhaustive()
    }
}
