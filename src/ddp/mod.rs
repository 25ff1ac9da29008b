//! DistributedDataParallel: every rank trains a copy of the model on its part of the data, and the gradients are
//! averaged while they come out of backward.
mod backward;
mod bucket;
pub mod comm_hook;
mod core;
mod first;
mod gradients;
mod graph;
mod groups;
mod hook;
mod hook_state;
mod mixed_precision;
mod options;
mod order;
mod parameter;
mod reducer;
mod reduction;
mod registry;
mod sync;
mod usage;
mod verify;

pub use crate::tensor::variables::NamePredicate;
pub use backward::{DistributedModel, backward, backward_into};
pub use mixed_precision::MixedPrecision;
pub use options::DdpOptions;
pub(crate) use reducer::Reducer;
pub(crate) use reduction::shard::{PendingGradients, Shard, Staged, Staging};

use crate::process_group::ProcessGroup;
use crate::{Error, Result};
use candle_core::backprop::GradStore;
use candle_core::{DType, Module, ModuleT, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use comm_hook::{CommHook, CommHookState, CommHookTraffic};
use core::Core;
use graph::Registration;
use parameter::{Buffer, Frozen, HeldAs, Parameter, Role, Variables};
use registry::Registry;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

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
/// A model must not compute something from a parameter while it is constructed and keep the result, which would not
/// follow the parameter, nor ask for variables later on.
///
/// Several models in one graph are trained by [`candle_ddp::backward`](crate::backward()), or one of them while the others
/// are [frozen](Self::freeze).
pub struct DistributedDataParallel<M> {
    module: M,
    core: Box<Core>,
}

impl<M> DistributedDataParallel<M> {
    /// Builds a model whose variables live in `varmap` (those that are not there are made), of dtype `dtype`, on the
    /// device of `group`. A part of the model may be on the CPU where the group works on GPUs:
    /// `vb.set_device(Device::Cpu)`. Every rank calls it, and starts with the values of rank 0. With
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
        let (module, core) = Core::connect(reducer, built, registry.seal(), options)?;
        Ok(Self { module, core: Box::new(core) })
    }

    /// Wraps a model that was not built from a `VarBuilder` and computes with the variables themselves, given with
    /// their names. Its gradients go into the same buckets, but only when the backward pass is over, so that nothing
    /// overlaps; and a `loss.backward()` beside [`backward`](Self::backward) cannot be noticed.
    ///
    /// # Errors
    /// As with [`new`](Self::new); a name given twice is [`Error::Parameter`].
    pub fn from_vars(group: &ProcessGroup, module: M, vars: Vec<(String, Var)>, options: DdpOptions) -> Result<Self> {
        let reducer = Arc::new(Reducer::new(group.clone()));
        let mut variables = Variables::default();
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
                Role::Parameter => {
                    let held = HeldAs::Variable(Registration::new(&var, reducer.identity(), &name));
                    variables.parameters.push(Parameter { name, var, held });
                }
                Role::Frozen => variables.frozen.push(Frozen { name, var, converted: None }),
                Role::Buffer => variables.buffers.push(Buffer { name, var }),
                Role::Ignored => variables.ignored.push(Buffer { name, var }),
            }
        }
        let (module, core) = Core::connect(reducer, built, variables, options)?;
        Ok(Self { module, core: Box::new(core) })
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
        self.phase("refresh", || self.core.refresh())?;
        Ok(self.phase("forward", || f(&self.module))?)
    }

    /// Runs `f`, and shows it as `name` in the [trace](crate::trace), if there is one: for the optimizer's step, loading
    /// data, and whatever else a training step consists of. Forward and backward passes are there already.
    pub fn phase<T>(&self, name: &str, f: impl FnOnce() -> T) -> T {
        self.core.phase(name, f)
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
        match self.core.options.mixed_precision.and_then(|mixed| mixed.param_dtype) {
            Some(dtype) if xs.dtype().is_float() => Ok(xs.to_dtype(dtype)?),
            _ => Ok(xs.clone()),
        }
    }

    /// Computes the gradients of `loss` and averages them over the ranks, each bucket while the rest of the backward
    /// pass goes on. Every rank calls it as often as the others.
    ///
    /// The store holds, for each parameter's variable, the mean over the ranks of its gradient (a rank that did not use
    /// the parameter counts as zero), or what the [communication hook](comm_hook) has made of it; parameters that no rank
    /// used are not in it. Gradients of other variables are this rank's own.
    ///
    /// **The averaged gradients are views of the buckets.** As long as the store lives, the next pass leaves these
    /// buckets alone and takes new memory: drop the store after the step, and the memory is used again. Tensors that
    /// were cloned out of the store are valid until the next pass. (For all this the store holds a tensor more than
    /// there are gradients.)
    ///
    /// The store has the gradients of this loss alone. Where PyTorch calls `backward` for several losses before one
    /// step, use [`backward_into`](Self::backward_into). If the first gradients of a model are dropped and the second
    /// come without a change of the variables, rank 0 warns of it, through `log`.
    ///
    /// With [`no_sync`](Self::no_sync) nothing is sent: gradients add up in the buckets, and the store holds this
    /// rank's sums.
    ///
    /// # Errors
    /// [`Error::OtherModelInGraph`] when the loss depends on another DDP model: train both with
    /// [`candle_ddp::backward`](crate::backward()), or [`freeze`](Self::freeze) that one. [`Error::InvalidArgument`] when this
    /// model is frozen. Both are found before anything is sent, and leave the group as it was.
    ///
    /// When a rank's backward pass fails, the group is ended on all ranks, since the others wait for its gradients.
    pub fn backward(&self, loss: &Tensor) -> Result<GradStore> {
        backward::run(loss, &[&self.core], None)
    }

    /// [`backward`](Self::backward), whose gradients are added to those in `grads`: for a step after several losses, as
    /// PyTorch's `loss.backward()` adds to `parameter.grad`. An empty store is `GradStore::default()`. Every call
    /// averages its own gradients; under [`no_sync`](Self::no_sync) it leaves them in the buckets, and the next call
    /// without the guard averages and adds their sum.
    ///
    /// ```no_run
    /// # fn step(d: &candle_ddp::DistributedDataParallel<candle_nn::Linear>, real: &candle_core::Tensor, fake: &candle_core::Tensor) -> candle_ddp::Result<()> {
    /// # let bce = |x: &candle_core::Tensor, _: f64| x.mean_all();
    /// let mut grads = d.backward(&bce(&d.forward(real)?, 1.0)?)?;
    /// d.backward_into(&bce(&d.forward(&fake.detach())?, 0.0)?, &mut grads)?;
    /// // optimizer.step(&grads)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Gradients of tensors that are no variables are dropped.
    ///
    /// # Errors
    /// As with `backward`; [`Error::InvalidArgument`] when `grads` holds sums of a pass under `no_sync`, which are in the
    /// buckets as well. After an error, `grads` is as it was.
    pub fn backward_into(&self, loss: &Tensor, grads: &mut GradStore) -> Result<()> {
        backward::run_into(loss, &[&self.core], grads)
    }

    /// Until the guard is dropped, this model's parameters get no gradients: for backward passes that go through it and
    /// train another model, as that of a generator through its discriminator. PyTorch's `requires_grad_(False)`. The
    /// guard counts when the backward pass runs, whenever the graph was made.
    ///
    /// ```no_run
    /// # fn step<G: candle_core::Module, D: candle_core::Module>(g: &candle_ddp::DistributedDataParallel<G>, d: &candle_ddp::DistributedDataParallel<D>, noise: &candle_core::Tensor) -> candle_ddp::Result<()> {
    /// # let bce = |x: &candle_core::Tensor, _: f64| x.mean_all();
    /// let fake = g.forward(noise)?;
    /// let grads = {
    ///     let _frozen = d.freeze();
    ///     g.backward(&bce(&d.forward(&fake)?, 1.0)?)?
    /// };
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// candle computes the gradients all the same, and they are dropped: a model that is never trained computes less with
    /// [`DdpOptions::is_frozen`] or without DDP.
    pub fn freeze(&self) -> Freeze<'_> {
        self.core.reducer.identity().freeze();
        Freeze(&self.core)
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
        self.core.no_sync.fetch_add(1, Ordering::Relaxed);
        NoSync(&self.core.no_sync)
    }

    /// From now on, `hook` decides what is sent of a bucket and what `backward` returns (see [`comm_hook`]). Gradients are
    /// then not divided by the number of ranks, unless the hook does it. Every rank calls it, at most once, before the
    /// first backward pass. PyTorch's `register_comm_hook`.
    ///
    /// # Errors
    /// On every rank: ranks gave different hooks ([`Error::Mismatch`], which names the first difference), or one
    /// of them has a hook already or has begun to train ([`Error::InvalidArgument`] there, [`Error::RankFailed`] on the
    /// others).
    pub fn register_comm_hook(&self, hook: impl CommHook) -> Result<()> {
        let allowed = self.core.reducer.check_comm_hook();
        let verdict = verify::same_comm_hook(self.core.group(), allowed.as_ref().map(|()| hook.describe()));
        allowed?;
        verdict?;
        self.core.reducer.set_comm_hook(hook)
    }

    /// What the registered communication hook has been given and has sent so far; None without a hook.
    pub fn comm_hook_traffic(&self) -> Option<CommHookTraffic> {
        self.core.reducer.comm_hook_traffic()
    }

    /// What the registered communication hook remembers, to be saved and loaded; None without a hook.
    pub fn comm_hook_state(&self) -> Option<CommHookState<'_>> {
        self.comm_hook_traffic().map(|_| CommHookState(&self.core.reducer))
    }

    /// The variables that an optimizer trains, in the order in which the model asked for them; ignored ones come last.
    pub fn parameters(&self) -> Vec<Var> {
        self.named_parameters().into_iter().map(|(_, var)| var).collect()
    }

    /// [`parameters`](Self::parameters) with the model's own names for them.
    pub fn named_parameters(&self) -> Vec<(String, Var)> {
        let ignored = self.core.variables.ignored.iter().map(|Buffer { name, var }| (name.clone(), var.clone()));
        self.averaged_parameters().into_iter().chain(ignored).collect()
    }

    /// The parameters whose gradients are averaged.
    pub(crate) fn averaged_parameters(&self) -> Vec<(String, Var)> {
        let parameters = self.core.variables.parameters.iter();
        parameters.map(|Parameter { name, var, .. }| (name.clone(), var.clone())).collect()
    }

    pub(crate) fn reducer(&self) -> Arc<Reducer> {
        Arc::clone(&self.core.reducer)
    }

    /// The buffers with the model's own names for them, in the order in which the model asked for them.
    pub fn named_buffers(&self) -> Vec<(String, Var)> {
        self.core.variables.buffers.iter().map(|Buffer { name, var }| (name.clone(), var.clone())).collect()
    }

    /// The names of the parameters in each bucket, in the order in which the buckets are all-reduced: first the reverse
    /// of the order of registration, and from the second synchronised backward pass on, the order in which rank 0's
    /// gradients came in the first.
    pub fn buckets(&self) -> Vec<Vec<String>> {
        self.core.reducer.bucket_names()
    }

    /// The group over which gradients are averaged.
    pub fn process_group(&self) -> &ProcessGroup {
        self.core.group()
    }
}

impl<M> backward::sealed::HasCore for DistributedDataParallel<M> {
    fn core(&self) -> &Core {
        &self.core
    }
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

/// While it lives, a model's parameters get no gradients: see [`DistributedDataParallel::freeze`].
#[must_use = "the model's parameters get gradients again as soon as the guard is dropped"]
pub struct Freeze<'a>(&'a Core);

impl Drop for Freeze<'_> {
    fn drop(&mut self) {
        self.0.reducer.identity().unfreeze();
    }
}
