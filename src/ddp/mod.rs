//! DistributedDataParallel: every rank trains a copy of the model on its part of the data, and gradients are averaged
//! during the backward pass.
mod blocks;
mod buckets;
pub mod comm_hook;
pub(crate) mod gradients;
mod model;
mod pass;
mod reducer;
mod reduction;
pub(crate) mod watch;

pub use blocks::{Block, block};
pub(crate) use gradients::{check_averaged, first_kept, own_gradient};
pub use model::DistributedModel;
pub use model::memory::{DeviceMemory, MemoryEstimate};
pub use model::options::{Buckets, DdpOptions, Role, Unused};
pub use model::precision::Precision;
pub use model::sharding::Sharding;
pub(crate) use pass::backward::backward_in_parts;
pub use pass::backward::backward_with;
pub use pass::guards::Guard;
pub use pass::join::{JoinOptions, Joined, join};
pub use pass::options::Backward;
pub(crate) use reducer::Reducer;
pub(crate) use reduction::shard::{BucketMemory, PendingGradients, Shard};
pub use watch::non_finite::OnNonFinite;
pub use watch::replica_check::ReplicaCheck;

#[cfg(doc)]
use crate::Error;
use crate::Result;
use crate::panic::lock;
use crate::process_group::{Active, Operation, ProcessGroup};
use crate::state::{PerRank, StateDict};
use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use comm_hook::CommHook;
use model::parameter::{Buffer, Frozen, Parameter};
use reducer::hook_state::CommHookState;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

/// A model whose gradients are averaged over the ranks of a process group: PyTorch's `DistributedDataParallel`.
///
/// ```
/// use candle_ddp::nn::linear;
/// use candle_ddp::prelude::*;
///
/// fn main() -> Result<()> {
///     // Two ranks as threads. A program whose ranks are processes begins with `candle_ddp::run(|pg| …)`.
///     candle_ddp::spawn(2, |pg| {
///         let varmap = VarMap::new(); // gets the variables: `weight` and `bias`
///         let ddp = DistributedDataParallel::new(&pg, &varmap, |vb| linear(4, 1, vb))?;
///         let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default())?;
///         for _ in 0..3 {
///             let x = Tensor::randn(0f32, 1., (8, 4), pg.device())?; // this rank's samples
///             let loss = ddp.forward(&x)?.sqr()?.mean_all()?;
///             let grads = ddp.backward(&loss)?; // averaged over the ranks
///             optimizer.step(&grads)?;
///         }
///         Ok(())
///     })?;
///     Ok(())
/// }
/// ```
/// The model is built with a `VarBuilder` whose tensors are *replicas* of the variables in a `VarMap`. Optimizers
/// change the variables, and every forward pass first updates the replicas. In [`backward`](Self::backward), each
/// replica's gradient goes into a bucket, which is all-reduced while the backward pass continues. At construction all
/// ranks take rank 0's values.
///
/// Ranks may use different parameters in a step, without any option: a parameter that some rank used gets its averaged
/// gradient on all ranks, and one that no rank used gets none. If no rank uses a parameter in the first step, that is an
/// error unless [`DdpOptions::unused`] allows it.
///
/// A model must not compute something from a parameter during construction and keep the result, which would not follow
/// the parameter. It must not request variables later either.
///
/// Several models in one graph are trained together by [`backward_with`], or one of them
/// while the others are [frozen](Self::freeze).
pub struct DistributedDataParallel<M> {
    module: M,
    /// The model that computes instead of `module` under `no_grad`.
    no_grad_module: Option<M>,
    core: Box<DistributedModel>,
}

impl<M> DistributedDataParallel<M> {
    /// Runs `f` and shows it as `name` in the [trace](crate::trace), if there is one, and with the feature `nvtx` in Nsight Systems.
    /// Use it for the optimizer's step, data loading and other parts of a training step; forward and backward passes are traced already.
    pub fn phase<T>(&self, name: &str, f: impl FnOnce() -> T) -> T {
        self.core.phase(name, f)
    }

    /// Computes the gradients of `loss` and averages them over the ranks, each bucket while the rest of the backward
    /// pass continues. Every rank must call it equally often. [`backward_with`] is the general form: for several models, for sums
    /// over different numbers of samples, for several losses before a step, and for the micro-batches of virtual ranks.
    ///
    /// The store holds, for each parameter's variable, the mean of its gradient over the ranks, or the result of the
    /// [communication hook](comm_hook). A rank that did not use the parameter counts as zero; parameters that no rank
    /// used are not in the store. Gradients of other variables are not averaged.
    ///
    /// **The averaged gradients are views of the buckets.** While the store lives, the next pass leaves these buckets
    /// alone and allocates new memory: drop the store after the step, so that the memory is reused. Tensors cloned out
    /// of the store are valid until the next pass. (To track this, the store holds one tensor in addition to the
    /// gradients.)
    ///
    /// The store has the gradients of this loss only. Where PyTorch calls `backward` for several losses before one
    /// step, use [`backward_with`] and [`Backward::into`]. If a model's first gradients are dropped and the second ones
    /// come before any variable has changed, rank 0 warns.
    ///
    /// Under [`no_sync`](Self::no_sync) nothing is sent: gradients accumulate in the buckets, and the store holds this
    /// rank's sums. A [sharded](Sharding) model sends its gradients under it too, and the store holds none.
    ///
    /// # Errors
    /// Returns [`Error::OtherModelInGraph`] if the loss depends on another DDP model: train both with
    /// [`backward_with`], or [`freeze`](Self::freeze) the other. Returns
    /// [`Error::InvalidArgument`] if this model is frozen. Both are detected before anything is sent, and the group
    /// remains usable.
    ///
    /// Returns [`Error::UnusedParameters`] on all ranks if no rank used some parameter in the first synchronised pass, or if
    /// this rank's loss depends on none, unless [`DdpOptions::unused`] allows it.
    ///
    /// Returns [`Error::StaleGraph`] if the graph reaches a tensor that was computed before the parameters changed, such as
    /// the state of a recurrent layer that an earlier step has left without `detach`; the group then ends on all ranks. (On
    /// GPUs, and with [`from_vars`](Self::from_vars), nobody compares values: there it is a warning, once.)
    ///
    /// Returns [`Error::NonFinite`] on all ranks if [`DdpOptions::on_non_finite`] allows no more steps whose gradients are not finite.
    ///
    /// Returns [`Error::InvalidArgument`] if `loss` is not one number, or if another backward pass of this model is running, in
    /// an operation of the graph or on another thread.
    ///
    /// If a rank's backward pass fails, the group ends on all ranks, since the others wait for its gradients. Nothing of the
    /// pass is left to the next one, and gradients that had accumulated under `no_sync` are dropped.
    #[track_caller]
    pub fn backward(&self, loss: &Tensor) -> Result<GradStore> {
        backward_with(loss, &[&self.core], Backward::default())
    }

    /// Until the guard is dropped, this model's parameters get no gradients. This is for backward passes that go
    /// through this model to train another, such as a generator through its discriminator; PyTorch's
    /// `requires_grad_(False)`. What counts is whether the guard lives when the backward pass runs, not when the graph
    /// was made.
    ///
    /// ```
    /// use candle_ddp::nn::linear;
    /// use candle_ddp::prelude::*;
    ///
    /// # fn main() -> Result<()> {
    /// candle_ddp::spawn(2, |pg| {
    ///     let model = |inputs, outputs| {
    ///         let build = move |vb: VarBuilder<'static>| linear(inputs, outputs, vb);
    ///         DistributedDataParallel::new(&pg, &VarMap::new(), build)
    ///     };
    ///     let (generator, discriminator) = (model(2, 4)?, model(4, 1)?);
    ///     let noise = Tensor::randn(0f32, 1., (8, 2), pg.device())?;
    ///     let fake = generator.forward(&noise)?;
    ///     let grads = {
    ///         let _frozen = discriminator.freeze();
    ///         generator.backward(&discriminator.forward(&fake)?.mean_all()?.neg()?)?
    ///     };
    ///     assert!(generator.parameters().iter().all(|parameter| grads.get(parameter).is_some()));
    ///     assert!(discriminator.parameters().iter().all(|parameter| grads.get(parameter).is_none()));
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// candle computes the gradients anyway, and they are dropped. A model that is never trained costs less with
    /// [`Role::Frozen`] or without DDP.
    pub fn freeze(&self) -> Guard<'_> {
        Guard::freeze(&self.core)
    }

    /// Until the guard is dropped, `backward` sends nothing and gradients accumulate in the buckets; the first
    /// `backward` after that averages the sums. As in PyTorch, n accumulated passes give the sum of their gradients:
    /// divide the losses by n to get the gradient of the large batch. Meanwhile, buffers are not broadcast. The stores of these
    /// passes hold this rank's sums, with which an [`Optimizer`](crate::optim::Optimizer) of this crate refuses to make a step.
    /// [`sync_if`](Self::sync_if) has an example.
    ///
    /// A [sharded](Sharding) model sends its gradients in these passes too, since whole sums would take the memory that sharding saves:
    /// each pass reduce-scatters its buckets, and each rank adds up its parts, so that four passes take no more memory than one. (With
    /// hybrid sharding, only the last pass sends anything between the copies of the model.) So all ranks make equally many passes, as
    /// without the guard: otherwise it is an error on all of them. In a [`join`](Self::join) they need not. A pass that fails on one rank
    /// ends the group, and the stores hold none of the gradients.
    pub fn no_sync(&self) -> Guard<'_> {
        Guard::no_sync(&self.core)
    }

    /// [`no_sync`](Self::no_sync) unless `sync` is true, for loops that accumulate gradients. Keep the guard until the pass is
    /// done:
    ///
    /// ```
    /// use candle_ddp::nn::linear;
    /// use candle_ddp::prelude::*;
    ///
    /// # fn main() -> Result<()> {
    /// candle_ddp::spawn(2, |pg| {
    ///     let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), |vb| linear(4, 1, vb))?;
    ///     let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default())?;
    ///     for index in 0..8 {
    ///         let x = Tensor::randn(0f32, 1., (8, 4), pg.device())?;
    ///         let is_last = index % 4 == 3;
    ///         let _guard = ddp.sync_if(is_last);
    ///         let grads = ddp.backward(&(ddp.forward(&x)?.sqr()?.mean_all()? / 4.)?)?;
    ///         if is_last {
    ///             optimizer.step(&grads)?;
    ///         }
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn sync_if(&self, sync: bool) -> Option<Guard<'_>> {
        if sync { None } else { Some(self.no_sync()) }
    }

    /// Gives all ranks rank 0's buffers, such as the running statistics of batch norms. Synchronised backward passes do so by
    /// themselves; call this where ranks may have different buffers since the last one, as after a forward pass in
    /// training mode without a backward pass, so that they evaluate and save the same model. Every rank must call it.
    ///
    /// # Errors
    /// The errors of [`broadcast`](ProcessGroup::broadcast).
    pub fn broadcast_buffers(&self) -> Result<()> {
        let buffers = self.core.variables.buffers.iter().map(|buffer| &buffer.var);
        buckets::sync::broadcast(self.core.reducer.groups(), buffers, 0)?.finish()
    }

    /// Drops the gradients that have accumulated under [`no_sync`](Self::no_sync). Otherwise they become part of the
    /// next synchronised pass, even in a later epoch or after a checkpoint is loaded. Under
    /// [sharding](Sharding), drops the averaged gradients as well if no
    /// step has used them. Every rank must call it. (Gradients in a `GradStore` end with the store.) PyTorch's
    /// `zero_grad`.
    pub fn zero_grad(&self) {
        self.core.reducer.zero_grad();
        lock(&self.core.skipped).ignored = None;
    }

    /// Runs `body`, this rank's training loop, when ranks have different numbers of batches: PyTorch's `with
    /// model.join():`. A rank whose `body` has returned takes part in the backward passes of the others, with zeros
    /// for gradients, until the last one has returned. Then all ranks take the model of a rank that trained longest.
    /// Every rank must call this.
    ///
    /// ```
    /// # use candle_core::{DType, Tensor};
    /// # use candle_ddp::{DdpOptions, DistributedDataParallel, JoinOptions, optim::{AdamW, Optimizer, ParamsAdamW}};
    /// # use candle_nn::{VarMap, linear};
    /// # fn main() -> candle_ddp::Result<()> {
    /// # candle_ddp::spawn(2, |pg| {
    /// # let build = |vb| linear(4, 2, vb);
    /// # let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), build)?;
    /// # let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default())?;
    /// # let batches = vec![Tensor::ones((8, 4), DType::F32, pg.device())?; 3 + pg.rank()];
    /// let joined = ddp.join(JoinOptions::default(), || {
    ///     for x in &batches {
    ///         let grads = ddp.backward(&ddp.forward(x)?.sqr()?.mean_all()?)?;
    ///         optimizer.step(&grads)?;
    ///     }
    ///     Ok(())
    /// })?;
    /// joined.sync(&mut optimizer)?; // its moments, and the number of steps
    /// # Ok(())
    /// # })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Inside of it, each backward pass that averages gradients begins with one small collective, by which ranks
    /// learn who has inputs left. Passes under [`no_sync`](Self::no_sync) send nothing, except those of sharded models, and gradients that
    /// a rank has accumulated when its inputs end go into the next pass of the others. While rank 0 has no inputs, buffers come
    /// from the lowest rank that has some. Forward passes in evaluation may differ from rank to rank, as always.
    ///
    /// `body` must not call other collectives: sum losses, for example, after the join. A
    /// [`GradScaler`](crate::amp::GradScaler) works, and [`Joined::sync`] brings it and the optimizer up to date; the
    /// optimizer of a [sharded](Sharding) model has its own [`join`](crate::optim::FusedOptimizer::join). `SyncBatchNorm` is
    /// refused in training mode, as PyTorch's `join` does not support it either: its statistics need all ranks in the
    /// middle of each forward pass.
    ///
    /// # Errors
    /// An error or panic of `body` on one rank ends the group, as with
    /// [`abort_on_error`](ProcessGroup::abort_on_error). Every rank gets [`Error::Mismatch`] if ranks gave different
    /// options, and [`Error::InputsExhausted`] with [`JoinOptions::throw_on_early_termination`]. Inside another join
    /// of the same group, returns [`Error::InvalidArgument`].
    pub fn join<T>(&self, options: JoinOptions, body: impl FnOnce() -> Result<T>) -> Result<Joined<T>> {
        pass::join::run(&[&self.core], options, &mut (), |()| body(), |(), _, _| Ok(false))
    }

    pub(crate) fn join_with<T, C>(
        &self,
        options: JoinOptions,
        context: &mut C,
        body: impl FnOnce(&mut C) -> Result<T>,
        shadow: impl FnMut(&mut C, Operation, &Active) -> Result<bool>,
    ) -> Result<Joined<T>> {
        pass::join::run(&[&self.core], options, context, body, shadow)
    }

    /// Registers `hook`, which then decides what is sent of a bucket and what `backward` returns (see [`comm_hook`]).
    /// Gradients are no longer divided by the number of ranks unless the hook does it. Every rank must call this, at
    /// most once, before the first backward pass. PyTorch's `register_comm_hook`.
    ///
    /// # Errors
    /// Returns [`Error::Mismatch`] with the first difference on every rank if ranks gave different hooks. If a rank
    /// already has a hook or has begun to train, it gets [`Error::InvalidArgument`], and the others get
    /// [`Error::RankFailed`].
    pub fn register_comm_hook(&self, hook: impl CommHook) -> Result<()> {
        let allowed = self.core.reducer.check_comm_hook();
        let verdict = watch::verify::same_comm_hook(self.core.group(), allowed.as_ref().map(|()| hook.describe()));
        allowed?;
        verdict?;
        self.core.reducer.set_comm_hook(hook)
    }

    /// The bytes of all gradients that the registered communication hook has received so far, and the bytes that this rank passed to collectives
    /// for them; None without a hook. The latter include one byte per parameter for the used flags, one for requests to stop, and one if
    /// [`DdpOptions::on_non_finite`] is set, and are None if the hook does not count them.
    pub fn comm_hook_traffic(&self) -> Option<(u64, Option<u64>)> {
        self.core.reducer.comm_hook_traffic()
    }

    /// The state of the registered communication hook on this rank, such as PowerSGD's factors, errors that are added later, and the
    /// number of passes; None without a hook. It differs between ranks, so each rank saves its own: a
    /// [`Checkpointer`](crate::checkpoint::Checkpointer) does so, and so does this:
    ///
    /// ```no_run
    /// # fn step<M>(ddp: &candle_ddp::DistributedDataParallel<M>, rank: usize) -> candle_ddp::Result<()> {
    /// use candle_ddp::checkpoint::StateDict;
    /// if let Some(mut hook) = ddp.comm_hook_state() {
    ///     hook.save(format!("hook-{rank}.safetensors"))?;
    ///     hook.load(format!("hook-{rank}.safetensors"))?; // after register_comm_hook, in a world of the same size
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// The states of a world of another size are [`Error::InvalidArgument`].
    pub fn comm_hook_state(&self) -> Option<impl StateDict + fmt::Debug + '_> {
        self.comm_hook_traffic().map(|_| PerRank(CommHookState { reducer: &self.core.reducer }))
    }

    /// The variables that an optimizer trains, in the order in which the model requested them; ignored ones come last.
    pub fn parameters(&self) -> Vec<Var> {
        self.named_parameters().into_iter().map(|(_, var)| var).collect()
    }

    /// The [`parameters`](Self::parameters) with the model's names for them.
    pub fn named_parameters(&self) -> Vec<(String, Var)> {
        let ignored = self.core.variables.ignored.iter().map(|Buffer { name, var }| (name.clone(), var.clone()));
        self.averaged_parameters().into_iter().chain(ignored).collect()
    }

    /// The [frozen](Role::Frozen) variables with the model's names for them, in the order in which the model
    /// requested them. Together with [`named_parameters`](Self::named_parameters), they are what PyTorch's `named_parameters` returns, for
    /// averages of weights that may be thawed later; with [`named_buffers`](Self::named_buffers), they are all variables of the model.
    pub fn named_frozen(&self) -> Vec<(String, Var)> {
        self.core.variables.frozen.iter().map(|Frozen { name, var, .. }| (name.clone(), var.clone())).collect()
    }

    /// The parameters whose gradients are averaged.
    pub(crate) fn averaged_parameters(&self) -> Vec<(String, Var)> {
        let parameters = self.core.variables.parameters.iter();
        parameters.map(|Parameter { name, var, .. }| (name.clone(), var.clone())).collect()
    }

    pub(crate) fn reducer(&self) -> Arc<Reducer> {
        Arc::clone(&self.core.reducer)
    }

    /// The buffers with the model's names for them, in the order in which the model requested them.
    pub fn named_buffers(&self) -> Vec<(String, Var)> {
        self.core.variables.buffers.iter().map(|Buffer { name, var }| (name.clone(), var.clone())).collect()
    }

    /// The names of the parameters in each bucket, in the order in which buckets are all-reduced: at first the reverse
    /// of the registration order; from the second synchronised backward pass on, the order in which rank 0's gradients
    /// arrived in the first.
    pub fn buckets(&self) -> Vec<Vec<String>> {
        self.core.reducer.bucket_names()
    }

    /// The number of steps that [`OnNonFinite::Skip`] has left out since the model was built, or since the [elastic run](crate::elastic)
    /// began: DeepSpeed's `skipped_steps`. A [`Checkpointer`](crate::checkpoint::Checkpointer) does not save it, so that in a run that resumes it is 0,
    /// and a row of such steps begins anew; a program that needs the total saves that as a part. The same on all ranks, except that a rank without inputs in a [`join`](Self::join) counts nothing.
    pub fn skipped_steps(&self) -> u64 {
        // A program that asks knows what not to do with the gradients. If the GPU has failed, the next call is an error.
        lock(&self.core.late).iter().for_each(|verdict| verdict.follow());
        let _ = self.core.settle_late();
        lock(&self.core.skipped).total
    }

    /// How the model is spread over the ranks. The [`parameters`](Self::parameters) of a model of [`Sharding::Blocks`] are this rank's pieces.
    pub fn sharding(&self) -> Sharding {
        self.core.options.sharding
    }

    /// The group over which gradients are averaged.
    pub fn process_group(&self) -> &ProcessGroup {
        self.core.group()
    }
}

/// In lists of models, where their modules' types do not matter: see [`backward_with`].
impl<M> Deref for DistributedDataParallel<M> {
    type Target = DistributedModel;

    fn deref(&self) -> &DistributedModel {
        &self.core
    }
}

impl<M> fmt::Debug for DistributedDataParallel<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.core.fmt(f)
    }
}
