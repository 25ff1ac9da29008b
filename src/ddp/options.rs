use super::mixed_precision::MixedPrecision;
use super::parameter::Role;
use crate::tensor::variables::NamePredicate;
use crate::trace;
use candle_core::DType;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// How DistributedDataParallel works. All ranks give the same.
///
/// PyTorch's `find_unused_parameters` and `static_graph` have no counterpart: unused parameters always work. Gradients
/// always are views of the buckets (`gradient_as_bucket_view`).
#[derive(Clone)]
pub struct DdpOptions {
    /// How many MiB of gradients are all-reduced together. Default: 25. 0 puts every parameter into a bucket of its own.
    pub bucket_cap_mb: f64,
    /// The size in MiB of the first bucket, which is smaller so that communication begins early. Default: 1.
    pub first_bucket_mb: f64,
    /// Whether all ranks take over rank 0's buffers, such as running means, in every synchronised backward pass: so
    /// that they are equal before the next forward pass, as in PyTorch. Default: true.
    pub broadcast_buffers: bool,
    /// Which variables are buffers: without a gradient, and handed to the model as they are. Variables of integer type
    /// always are. Default: names that end in `running_mean`, `running_var` or `num_batches_tracked`.
    pub is_buffer: NamePredicate,
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
            is_buffer: Arc::new(is_batch_norm_buffer),
            is_ignored: Arc::new(|_| false),
            mixed_precision: None,
            init_seed: None,
            trace: std::env::var_os(trace::FOLDER_VARIABLE).map(PathBuf::from),
        }
    }
}

impl DdpOptions {
    pub(super) fn role(&self, name: &str, dtype: DType) -> Role {
        if (self.is_ignored)(name) {
            Role::Ignored
        } else if !dtype.is_float() || (self.is_buffer)(name) {
            Role::Buffer
        } else {
            Role::Parameter
        }
    }
}

fn is_batch_norm_buffer(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or(name);
    ["running_mean", "running_var", "num_batches_tracked"].contains(&last)
}

impl fmt::Debug for DdpOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DdpOptions")
            .field("bucket_cap_mb", &self.bucket_cap_mb)
            .field("first_bucket_mb", &self.first_bucket_mb)
            .field("broadcast_buffers", &self.broadcast_buffers)
            .field("mixed_precision", &self.mixed_precision)
            .field("init_seed", &self.init_seed)
            .field("trace", &self.trace)
            .finish_non_exhaustive()
    }
}
