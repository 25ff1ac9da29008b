//! DistributedDataParallel: every rank trains a copy of the model on its part of the data, and the gradients are
//! averaged while they come out of backward.
mod bucket;
pub mod comm_hook;
mod hook;
mod hook_state;
mod mixed_precision;
mod options;
mod parameter;
mod reducer;
mod reduction;
mod registry;
mod sync;
mod usage;
mod verify;

pub use crate::tensor::variables::NamePredicate;
pub use mixed_precision::MixedPrecision;
pub use options::DdpOptions;
pub(crate) use reducer::Reducer;
pub(crate) use reduction::shard::{PendingGradients, Shard, Staged, Staging};

use crate::backend;
use crate::panic::panic_message;
use crate::process_group::ProcessGroup;
use crate::tensor::copy;
use crate::trace::{Row, Trace};
use crate::{Error, Result};
use bucket::BucketCaps;
use candle_core::backprop::GradStore;
use candle_core::{DType, Module, ModuleT, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use comm_hook::{CommHook, CommHookState, CommHookTraffic};
use parameter::{Buffer, Parameter, Role};
use reducer::Gradient;
use registry::Registry;
use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// A model whose gradients are averaged over the ranks of a process group: PyTorch's `DistributedDataParallel`.
///
/// The model is built with a `VarBuilder` whose tensors are *replicas* of the variables in a `VarMap`: optimizers change
/// the variables, every forward pass begins by bringing the replicas up to date, and in
/// [`backward`](Self::backward) each replica's gradient goes into a bucket that is all-reduced while the backward pass
/// goes on. At construction all ranks take over the values of rank 0.
///
/// Ranks may use different parameters in a step: a parameter that some rank used gets its averaged gradient on all,
/// one that no rank used gets none, and no option needs to be set for it.
///
/// What the model may not do: compute something from a parameter while it is constructed and keep the result (it would
/// not follow the parameter), or ask for variables later on.
pub struct DistributedDataParallel<M> {
    module: M,
    group: ProcessGroup,
    reducer: Arc<Reducer>,
    parameters: Vec<Parameter>,
    buffers: Vec<Buffer>,
    ignored: Vec<Buffer>,
    options: DdpOptions,
    no_sync: AtomicUsize,
}

impl<M> DistributedDataParallel<M> {
    /// Builds a model whose variables live in `varmap` (those that are not there are made), of dtype `dtype`, on the
    /// device of `group`. Every rank calls it, and starts with the values of rank 0. With
    /// [`DdpOptions::mixed_precision`] the model computes with copies of them in another dtype.
    ///
    /// A closure that ends in `Ok(…)` has to say which error it could have had:
    ///
    /// ```
    /// # use candle_core::DType;
    /// # use candle_ddp::{DdpOptions, DistributedDataParallel};
    /// # use candle_nn::{Linear, VarBuilder, VarMap, linear};
    /// struct Net(Linear);
    ///
    /// # fn main() -> candle_ddp::Result<()> {
    /// # candle_ddp::spawn(2, |pg| {
    /// let build = |vb: VarBuilder| {
    ///     let head = linear(4, 2, vb.pp("head"))?;
    ///     Ok::<_, candle_core::Error>(Net(head))
    /// };
    /// let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), DType::F32, build, DdpOptions::default())?;
    /// # assert_eq!(ddp.parameters().len(), 2);
    /// # Ok(())
    /// # })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// On every rank alike: `build` failed on one of them ([`Error::RankFailed`]), or they built different models or
    /// gave different options ([`Error::Mismatch`], which names the first difference).
    pub fn new<E>(
        group: &ProcessGroup,
        varmap: &VarMap,
        dtype: DType,
        build: impl FnOnce(VarBuilder<'static>) -> std::result::Result<M, E>,
        options: DdpOptions,
    ) -> Result<Self>
    where
        Error: From<E>,
    {
        let reducer = Arc::new(Reducer::new(group.clone()));
        let registry = Registry::new(varmap.clone(), Arc::clone(&reducer), options.clone(), dtype);
        let held_as = options.mixed_precision.and_then(|mixed| mixed.param_dtype).unwrap_or(dtype);
        let builder = VarBuilder::from_backend(Box::new(registry.clone()), held_as, group.device().clone());
        let built = build(builder).map_err(Error::from);
        let (parameters, buffers, ignored) = registry.seal();
        Self::connect(group, reducer, built, parameters, buffers, ignored, options)
    }

    /// Wraps a model that was not built from a `VarBuilder` and computes with the variables themselves, given with
    /// their names. Its gradients go into the same buckets, but only when the backward pass is over, so that nothing
    /// overlaps; and a `loss.backward()` beside [`backward`](Self::backward) cannot be noticed.
    ///
    /// # Errors
    /// As with [`new`](Self::new); a name given twice is [`Error::Parameter`].
    pub fn from_vars(group: &ProcessGroup, module: M, vars: Vec<(String, Var)>, options: DdpOptions) -> Result<Self> {
        let reducer = Arc::new(Reducer::new(group.clone()));
        let (mut parameters, mut buffers, mut ignored) = (Vec::new(), Vec::new(), Vec::new());
        let (mut names, mut ids) = (HashSet::new(), HashSet::new());
        let mut built = Ok(module);
        if options.mixed_precision.is_some_and(|mixed| mixed.param_dtype.is_some() || mixed.buffer_dtype.is_some()) {
            let reason = "a model made without DDP's VarBuilder computes with its variables as they are: use `new`, or set \
                          reduce_dtype alone";
            built = Err(Error::invalid("mixed_precision", reason));
        }
        for (name, var) in vars {
            if !names.insert(name.clone()) || !ids.insert(var.id()) {
                built = Err(Error::parameter(name, "it is in `vars` twice: give every variable once, under one name"));
                break;
            }
            match options.role(&name, var.dtype()) {
                Role::Parameter => parameters.push(Parameter { name, var, replica: None }),
                Role::Buffer => buffers.push(Buffer { name, var }),
                Role::Ignored => ignored.push(Buffer { name, var }),
            }
        }
        Self::connect(group, reducer, built, parameters, buffers, ignored, options)
    }

    fn connect(
        group: &ProcessGroup,
        reducer: Arc<Reducer>,
        built: Result<M>,
        parameters: Vec<Parameter>,
        buffers: Vec<Buffer>,
        ignored: Vec<Buffer>,
        options: DdpOptions,
    ) -> Result<Self> {
        let built = built.and_then(|module| {
            options.mixed_precision.unwrap_or_default().check()?;
            check_parameters(group, &parameters, &buffers)?;
            if let Some(folder) = &options.trace {
                reducer.set_trace(Trace::create(folder, group.rank())?);
            }
            Ok((module, BucketCaps::from_mib(options.first_bucket_mb, options.bucket_cap_mb)?))
        });
        // A rank that has no model takes part in the check, so that the others hear of it.
        let verdict = verify::same_model(group, &options, built.as_ref().map(|_| (&parameters[..], &buffers[..])));
        let (module, caps) = built?;
        verdict?;
        let reduce_dtype = options.mixed_precision.and_then(|mixed| mixed.reduce_dtype);
        reducer.set_parameters(parameters.iter().map(|parameter| parameter.info(reduce_dtype)).collect(), caps)?;
        let vars = parameters.iter().map(|parameter| &parameter.var).chain(buffers.iter().map(|buffer| &buffer.var));
        sync::broadcast(group, vars)?.finish()?;
        let no_sync = AtomicUsize::new(0);
        Ok(Self { module, group: group.clone(), reducer, parameters, buffers, ignored, options, no_sync })
    }

    /// Runs `f` on the model, with every parameter up to date: for models whose forward pass takes other arguments
    /// than one tensor, and for evaluation.
    ///
    /// Call it, [`forward`](Self::forward) and [`forward_t`](Self::forward_t) between a forward pass and its
    /// [`backward`](Self::backward) only while the variables stay as they are: after a change, by
    /// [`Ema::apply`](crate::optim::Ema::apply) for example, that backward pass would use the new values.
    pub fn call<T, E>(&self, f: impl FnOnce(&M) -> std::result::Result<T, E>) -> Result<T>
    where
        Error: From<E>,
    {
        self.phase("refresh", || -> Result<()> {
            // candle cannot report that a variable changed, so all are copied every time. The last ones come first: the
            // optimizer has just written them, and the model reads the first ones first.
            let backwards = self.parameters.iter().rev();
            copy::copy_all(backwards.filter_map(|Parameter { var, replica, .. }| Some((replica.as_ref()?, &**var))))
        })?;
        Ok(self.phase("forward", || f(&self.module))?)
    }

    /// Runs `f`, and shows it as `name` in the [trace](crate::trace), if there is one: for the optimizer's step, loading
    /// data, and whatever else a training step consists of. Forward and backward passes are there already.
    pub fn phase<T>(&self, name: &str, f: impl FnOnce() -> T) -> T {
        let Some(trace) = self.reducer.trace() else { return f() };
        let start = Instant::now();
        let result = f();
        // The host is ahead of a GPU. What is wrong with the GPU comes out of the next operation.
        let _ = self.group.device().synchronize();
        // The name goes into JSON as it is.
        let name: String = name.chars().filter(|c| !c.is_control() && !"\"\\".contains(*c)).collect();
        trace.span(Row::Training, name, start, Instant::now());
        result
    }

    /// The model's forward pass on `xs`, which mixed precision converts.
    pub fn forward(&self, xs: &Tensor) -> Result<Tensor>
    where
        M: Module,
    {
        let xs = self.input(xs)?;
        self.call(|module| module.forward(&xs))
    }

    /// The model's forward pass on `xs`, which mixed precision converts, in training or in evaluation mode.
    pub fn forward_t(&self, xs: &Tensor, train: bool) -> Result<Tensor>
    where
        M: ModuleT,
    {
        let xs = self.input(xs)?;
        self.call(|module| module.forward_t(&xs, train))
    }

    /// What the model gets for `xs`: under mixed precision a tensor of `param_dtype`, unless it holds integers.
    fn input(&self, xs: &Tensor) -> Result<Tensor> {
        match self.options.mixed_precision.and_then(|mixed| mixed.param_dtype) {
            Some(dtype) if xs.dtype().is_float() => Ok(xs.to_dtype(dtype)?),
            _ => Ok(xs.clone()),
        }
    }

    /// Computes the gradients of `loss` and averages them over the ranks, each bucket while the rest of the backward
    /// pass goes on. Every rank calls it as often as the others.
    ///
    /// The store holds, for each parameter's variable, the mean over the ranks of its gradient (a rank that did not use
    /// the parameter counts as zero), or what the [communication hook](comm_hook) has made of it; parameters that no rank
    /// used are not in it. Gradients of other variables are this rank's own. **The averaged gradients are views of the buckets, and valid until the next call.**
    ///
    /// With [`no_sync`](Self::no_sync) nothing is sent: gradients add up, and the store holds this rank's sums.
    ///
    /// # Errors
    /// When a rank's backward pass fails, the group is ended on all ranks, since the others wait for its gradients.
    pub fn backward(&self, loss: &Tensor) -> Result<GradStore> {
        let synchronise = self.no_sync.load(Ordering::Relaxed) == 0;
        // An operation of the model's own may panic.
        let result = catch_unwind(AssertUnwindSafe(|| self.run_backward(loss, synchronise)));
        let reason = match &result {
            Ok(Ok(_)) => None,
            Ok(Err(error)) => Some(format!("backward failed: {error}")),
            Err(panic) => Some(format!("backward failed: {}", panic_message(&**panic))),
        };
        if let Some(reason) = reason {
            self.reducer.cancel();
            // Alone in its world, a rank may try again, with a smaller batch for example.
            if synchronise && self.group.world_size() > 1 {
                self.group.abort(&reason);
            }
        }
        result.unwrap_or_else(|panic| resume_unwind(panic))
    }

    fn run_backward(&self, loss: &Tensor, synchronise: bool) -> Result<GradStore> {
        if self.reducer.trace().is_some() {
            self.group.measure_spans()?;
        }
        self.reducer.prepare_for_backward(synchronise)?;
        // The backward pass does not read buffers, so that their way to the other ranks costs no time.
        let buffers = if synchronise && self.options.broadcast_buffers {
            Some(sync::broadcast(&self.group, self.buffers.iter().map(|buffer| &buffer.var))?)
        } else {
            None
        };
        let mut grads = self.phase("backward", || loss.backward())?;
        for (index, parameter) in self.parameters.iter().enumerate().rev() {
            if parameter.replica.is_none()
                && let Some(gradient) = grads.remove(&parameter.var)
            {
                self.reducer.gradient(index, &gradient)?;
            }
        }
        let averaged = self.phase("wait for buckets", || self.reducer.finalize_backward())?;
        for (parameter, gradient) in self.parameters.iter().zip(averaged) {
            if let Gradient::Present(gradient) = gradient {
                grads.insert(&parameter.var, gradient);
            }
        }
        if let Some(buffers) = buffers {
            buffers.finish()?;
        }
        if let Some(trace) = self.reducer.trace() {
            trace.flush();
        }
        Ok(grads)
    }

    /// Until the guard is dropped, `backward` sends nothing and gradients add up in the buckets; the first `backward`
    /// after it averages the sums. As in PyTorch, the gradient of n accumulated passes is the sum of theirs: divide the
    /// losses by n for the gradient of the big batch. Buffers are not broadcast meanwhile.
    ///
    /// ```no_run
    /// # fn step<M: candle_core::Module>(ddp: &candle_ddp::DistributedDataParallel<M>, micro_batches: &[candle_core::Tensor]) -> candle_ddp::Result<()> {
    /// let (last, others) = micro_batches.split_last().expect("at least one");
    /// {
    ///     let _guard = ddp.no_sync();
    ///     for x in others {
    ///         ddp.backward(&ddp.forward(x)?.mean_all()?)?;
    ///     }
    /// }
    /// let grads = ddp.backward(&ddp.forward(last)?.mean_all()?)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn no_sync(&self) -> NoSync<'_> {
        self.no_sync.fetch_add(1, Ordering::Relaxed);
        NoSync(&self.no_sync)
    }

    /// From now on, `hook` decides what is sent of a bucket and what comes out (see [`comm_hook`]); without, the mean
    /// over the ranks. Gradients are then not divided by the number of ranks, unless the hook does it. Every rank calls
    /// it, at most once, before the first backward pass. PyTorch's `register_comm_hook`.
    ///
    /// # Errors
    /// On every rank: ranks gave different hooks ([`Error::Mismatch`], which names the first difference), or one
    /// of them has a hook already or has begun to train ([`Error::InvalidArgument`] there, [`Error::RankFailed`] on the
    /// others).
    pub fn register_comm_hook(&self, hook: impl CommHook) -> Result<()> {
        let allowed = self.reducer.check_comm_hook();
        let verdict = verify::same_comm_hook(&self.group, allowed.as_ref().map(|()| hook.describe()));
        allowed?;
        verdict?;
        self.reducer.set_comm_hook(hook)
    }

    /// What the registered communication hook has been given and has sent so far; None without a hook.
    pub fn comm_hook_traffic(&self) -> Option<CommHookTraffic> {
        self.reducer.comm_hook_traffic()
    }

    /// What the registered communication hook remembers, to be saved and loaded; None without a hook.
    pub fn comm_hook_state(&self) -> Option<CommHookState<'_>> {
        self.comm_hook_traffic().map(|_| CommHookState(&self.reducer))
    }

    /// The variables that an optimizer trains, in the order in which the model asked for them; ignored ones come last.
    pub fn parameters(&self) -> Vec<Var> {
        self.named_parameters().into_iter().map(|(_, var)| var).collect()
    }

    /// [`parameters`](Self::parameters) with the model's own names for them.
    pub fn named_parameters(&self) -> Vec<(String, Var)> {
        let ignored = self.ignored.iter().map(|ignored| (ignored.name.clone(), ignored.var.clone()));
        self.parameters.iter().map(|parameter| (parameter.name.clone(), parameter.var.clone())).chain(ignored).collect()
    }

    /// The parameters whose gradients are averaged.
    pub(crate) fn averaged_parameters(&self) -> Vec<(String, Var)> {
        self.parameters.iter().map(|parameter| (parameter.name.clone(), parameter.var.clone())).collect()
    }

    pub(crate) fn reducer(&self) -> Arc<Reducer> {
        Arc::clone(&self.reducer)
    }

    /// The buffers with the model's own names for them, in the order in which the model asked for them.
    pub fn named_buffers(&self) -> Vec<(String, Var)> {
        self.buffers.iter().map(|buffer| (buffer.name.clone(), buffer.var.clone())).collect()
    }

    /// The names of the parameters in each bucket, in the order in which the buckets are all-reduced: first the reverse
    /// of the order of registration, and from the second synchronised backward pass on, the order in which rank 0's
    /// gradients came in the first.
    pub fn buckets(&self) -> Vec<Vec<String>> {
        self.reducer.bucket_names()
    }

    /// The group over which gradients are averaged.
    pub fn process_group(&self) -> &ProcessGroup {
        &self.group
    }
}

/// What the reducer and the broadcasts rely on.
fn check_parameters(group: &ProcessGroup, parameters: &[Parameter], buffers: &[Buffer]) -> Result<()> {
    if parameters.is_empty() {
        let reason = "it has no trainable parameter, so that there is nothing to average: build it with the VarBuilder \
                      that is handed to the closure, or wrap it with `from_vars`";
        return Err(Error::invalid("model", reason));
    }
    let parameters = parameters.iter().map(|Parameter { name, var, .. }| (name, var));
    for (name, var) in parameters.chain(buffers.iter().map(|Buffer { name, var }| (name, var))) {
        if !backend::takes(var.dtype()) {
            let reason = format!(
                "its dtype is {}, which cannot be sent to other ranks (f32, f64, f16 and bf16 can, and for buffers i64, \
                 u32 and u8): make it in one of these, or leave it to each rank with is_ignored",
                var.dtype().as_str()
            );
            return Err(Error::parameter(name, reason));
        }
        if !var.device().same_device(group.device()) {
            let (is, belongs) = (var.device().location(), group.device().location());
            let reason = format!(
                "it is on {is:?}, but the process group works on {belongs:?}: \
                 build the model with the VarBuilder that is handed to it, on the device of the group"
            );
            return Err(Error::parameter(name, reason));
        }
        if !var.is_contiguous() {
            return Err(Error::parameter(name, "its variable is not contiguous: make it from a contiguous tensor"));
        }
    }
    Ok(())
}

/// `xs.apply_t(&ddp, train)`, and every function that takes a module. (candle makes every `Module` a `ModuleT`, so that a
/// wrapper can only be one of the two.)
impl<M: ModuleT> ModuleT for DistributedDataParallel<M> {
    fn forward_t(&self, xs: &Tensor, train: bool) -> candle_core::Result<Tensor> {
        let xs = self.input(xs)?;
        Ok(self.call(|module| module.forward_t(&xs, train))?)
    }
}

/// While it lives, gradients add up instead of being averaged: see [`DistributedDataParallel::no_sync`].
#[must_use = "gradients are synchronised again as soon as the guard is dropped"]
pub struct NoSync<'a>(&'a AtomicUsize);

impl Drop for NoSync<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
