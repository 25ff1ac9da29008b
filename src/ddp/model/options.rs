use crate::ddp::model::precision::{Precision, check_dtype};
use crate::ddp::model::sharding::Sharding;
use crate::ddp::watch::non_finite::OnNonFinite;
use crate::ddp::watch::replica_check::ReplicaCheck;
use crate::variables::is_batch_norm_buffer;
use crate::{Result, trace};
use candle_core::DType;
use candle_ddp_base::debug_fields;
use candle_ddp_env::Variables;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// Options of DistributedDataParallel. All ranks must give the same.
///
/// ```
/// use candle_ddp::nn::{Linear, linear};
/// use candle_ddp::{Buckets, DdpOptions, Role, Unused, prelude::*};
/// use std::sync::Arc;
///
/// fn net(vb: VarBuilder) -> Result<(Linear, Linear)> {
///     Ok((linear(4, 8, vb.pp("body"))?, linear(8, 2, vb.pp("head"))?))
/// }
///
/// fn main() -> Result<()> {
///     candle_ddp::spawn(2, |pg| {
///         let is_frozen = |name: &str| name.starts_with("body.");
///         let options = DdpOptions {
///             init_seed: Some(42),
///             buckets: Buckets { bucket_cap_mb: 50., ..Default::default() },
///             role: Arc::new(move |name| if is_frozen(name) { Role::Frozen } else { Role::Parameter }),
///             unused: Unused::AllowNames(Arc::new(|name| name == "head.bias")),
///             ..Default::default()
///         };
///         let ddp = DistributedDataParallel::with_options(&pg, &VarMap::new(), net, options)?;
///         assert_eq!(ddp.parameters().len(), 2); // the head's weight and bias
///         Ok(())
///     })?;
///     Ok(())
/// }
/// ```
/// Ranks may use different parameters in every step, for which PyTorch needs `find_unused_parameters`; `static_graph` has no counterpart.
/// [`unused`](Self::unused) is about parameters that no rank uses at all.
/// Gradients are always views of the buckets (`gradient_as_bucket_view`).
#[derive(Clone)]
pub struct DdpOptions {
    /// The dtypes of the variables and of the model's computation. A parameter that is in the `VarMap` with another dtype is an
    /// error. Default: f32.
    pub precision: Precision,
    /// How gradients are put together and summed: see [`Buckets`].
    pub buckets: Buckets,
    /// Whether all ranks take rank 0's buffers, such as running means, in every synchronised backward pass, as in
    /// PyTorch. They are then equal before the next forward pass. Default: true.
    pub broadcast_buffers: bool,
    /// The role of the variable of this name. Default: every variable is a [`Role::Parameter`].
    ///
    /// Some variables are buffers whether the function says `Parameter`, `Frozen` or `Buffer`: those of integer type, and the
    /// statistics of batch norms, whose names end in `running_mean`, `running_var` or `num_batches_tracked`.
    pub role: Arc<dyn Fn(&str) -> Role + Send + Sync>,
    /// Which parameters may get no gradient on any rank in the first synchronised backward pass. Default: none; a parameter
    /// without a gradient is [`Error::UnusedParameters`](crate::Error::UnusedParameters) on every rank.
    pub unused: Unused,
    /// When the ranks compare their models, which may part without an error of any collective. Default: in the synchronised
    /// backward passes 2, 10 and 100, and in every 1000th, which costs less than a thousandth of a step; a difference is an error that names ranks and
    /// variables. None: never.
    pub replica_check: Option<ReplicaCheck>,
    /// The seed for initial values of variables that are not in the VarMap yet, which makes them reproducible (see
    /// [`seed::init`](crate::seed::init())). Default: None, and candle's generator draws them. In both cases all ranks
    /// start with rank 0's values.
    pub init_seed: Option<u64>,
    /// The folder for a timeline of the training steps, with one file per rank (see [`trace`](crate::trace)). Default: the
    /// folder that the environment variable `CANDLE_DDP_TRACE` names, if any. Without a folder, or with an empty path, there is
    /// no tracing and no cost.
    pub trace: Option<PathBuf>,
    /// The treatment of a step whose averaged gradients contain a NaN or an infinity: all ranks leave it out, or all get an error that
    /// names the rank and the parameter. Default: [`OnNonFinite::Stop`] if the environment variable `CANDLE_DDP_NAN_CHECK` is on, and
    /// otherwise [`OnNonFinite::Ignore`], which costs nothing.
    pub on_non_finite: Option<OnNonFinite>,
    /// The state that is spread over the ranks: the optimizer's with the gradients, or parameters too. Default: [`Sharding::Off`].
    pub sharding: Sharding,
}

impl Default for DdpOptions {
    fn default() -> Self {
        Self {
            precision: Precision::default(),
            buckets: Buckets::default(),
            broadcast_buffers: true,
            role: Arc::new(|_| Role::Parameter),
            unused: Unused::default(),
            replica_check: Some(ReplicaCheck::default()),
            init_seed: None,
            trace: None,
            on_non_finite: None,
            sharding: Sharding::Off,
        }
    }
}

impl DdpOptions {
    /// Takes from the environment what the program leaves to it.
    pub(in crate::ddp) fn resolve(&mut self, environment: Variables) -> Result<()> {
        let folder = self.trace.take().or_else(|| environment.path(trace::FOLDER_VARIABLE));
        self.trace = folder.filter(|folder| !folder.as_os_str().is_empty());
        let stops = environment.switch("CANDLE_DDP_NAN_CHECK")? == Some(true);
        self.on_non_finite = self.on_non_finite.or(stops.then_some(OnNonFinite::Stop));
        Ok(())
    }

    pub(in crate::ddp) fn policy(&self) -> OnNonFinite {
        self.on_non_finite.unwrap_or_default()
    }

    pub(in crate::ddp) fn check_precision(&self) -> Result<()> {
        self.precision.check()?;
        self.buckets.reduce_dtype.map_or(Ok(()), |dtype| check_dtype("reduce_dtype", dtype))
    }

    pub(in crate::ddp) fn role(&self, name: &str, dtype: DType) -> Role {
        match (self.role)(name) {
            Role::Ignored => Role::Ignored,
            _ if !dtype.is_float() || is_batch_norm_buffer(name) => Role::Buffer,
            role => role,
        }
    }
}

debug_fields!(DdpOptions: precision, buckets, broadcast_buffers, unused, replica_check, init_seed, trace,
    on_non_finite, sharding);

/// The buckets in which gradients travel, of all parameters in the order in which they become complete.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Buckets {
    /// The size in MiB of the gradients that are all-reduced together. 0 gives every parameter its own bucket.
    /// Default: 25.
    pub bucket_cap_mb: f64,
    /// The size in MiB of the first bucket, which is smaller so that communication begins early. Default: 1.
    pub first_bucket_mb: f64,
    /// The dtype in which gradients are summed over the ranks and accumulated under `no_sync`. If it is not the variables' dtype, the
    /// averaged gradients are converted in one pass. Default: None, the dtype in which they arrive.
    pub reduce_dtype: Option<DType>,
    /// Whether the averaged gradients keep the dtype in which they were summed, instead of their variables' dtype: the field of FSDP's
    /// `MixedPrecision`. The optimizers of [`optim`](crate::optim) take them, with the same results, and on GPUs AdamW and Adam read
    /// them as they are: this saves the memory of a converted copy, and the time to write and read it. Clipping rounds them to this
    /// dtype, and other code must expect it; candle's own optimizers refuse them. Not for f16 with a
    /// [`GradScaler`](crate::amp::GradScaler). Default: false.
    pub keep_low_precision_grads: bool,
}

impl Default for Buckets {
    fn default() -> Self {
        Self { bucket_cap_mb: 25.0, first_bucket_mb: 1.0, reduce_dtype: None, keep_low_precision_grads: false }
    }
}

/// How DDP treats a variable. The default is [`Parameter`](Self::Parameter).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// It is trained: its gradient is averaged over the ranks.
    #[default]
    Parameter,
    /// It is not trained, as after PyTorch's `requires_grad_(False)` before the model is wrapped. At construction all ranks take
    /// rank 0's value; after that, it is not sent. It is not among the
    /// [`parameters`](crate::DistributedDataParallel::parameters), so optimizers do not get it, and candle's backward pass skips
    /// what depends on nothing else. To thaw variables, rebuild DDP from the same `VarMap`.
    Frozen,
    /// It has no gradient, and the model gets the variable itself: PyTorch's `register_buffer`. See
    /// [`DdpOptions::broadcast_buffers`].
    Buffer,
    /// DDP leaves it alone: it is neither broadcast nor averaged, the model gets the variable itself, and `backward` returns this
    /// rank's own gradient for it. PyTorch's `_ddp_params_and_buffers_to_ignore`.
    Ignored,
}

/// Which parameters the loss need not depend on. Frozen, buffer and ignored variables do not count as parameters
/// here.
///
/// A parameter without a gradient is never trained, and nothing else shows it; often an operation between it and the
/// loss has no backward pass in candle. So this is an error unless the program allows it. Parameters are checked in
/// the first synchronised backward pass, together with gradients accumulated under `no_sync` before it. Later passes
/// may leave out any parameter. On every rank, the loss must depend on some parameter in every pass, unless all are
/// allowed to be unused.
#[derive(Clone, Default)]
pub enum Unused {
    /// None may be unused.
    #[default]
    Refuse,
    /// Any may be unused, as with PyTorch's `find_unused_parameters=True`.
    Allow,
    /// Parameters whose full names fulfil the predicate may be unused: experts of a mixture, or the heads of early exits.
    AllowNames(Arc<dyn Fn(&str) -> bool + Send + Sync>),
}

impl Unused {
    pub(in crate::ddp) fn allows(&self, name: &str) -> bool {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsString;

    fn resolve(options: DdpOptions, value: &str) -> Result<(Option<PathBuf>, OnNonFinite)> {
        let mut options = options;
        options.resolve(Variables::new(&|_| Some(OsString::from(value))))?;
        Ok((options.trace.clone(), options.policy()))
    }

    #[test]
    fn the_program_takes_precedence_over_the_environment() {
        let unset = DdpOptions::default;
        assert_eq!(resolve(unset(), "1").unwrap(), (Some("1".into()), OnNonFinite::Stop));
        assert_eq!(resolve(unset(), "").unwrap(), (None, OnNonFinite::Ignore));
        let off = DdpOptions { trace: Some(PathBuf::new()), on_non_finite: Some(OnNonFinite::Ignore), ..unset() };
        assert_eq!(resolve(off, "1").unwrap(), (None, OnNonFinite::Ignore));
        let on = DdpOptions { trace: Some("a".into()), on_non_finite: Some(OnNonFinite::Stop), ..unset() };
        assert_eq!(resolve(on, "0").unwrap(), (Some("a".into()), OnNonFinite::Stop));
        let error = resolve(unset(), "maybe").unwrap_err().to_string();
        assert_eq!(error, "CANDLE_DDP_NAN_CHECK=\"maybe\": it must be 1 or 0");
    }
}
