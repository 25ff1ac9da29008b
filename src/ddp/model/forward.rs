//! How programs compute with a wrapped model.
use crate::backend::CallSite;
use crate::ddp::model::no_grad;
use crate::ddp::{DistributedDataParallel, Precision};
use crate::goes_with::Feature;
use crate::tensor::MemoryFormat;
use crate::tensor::function::{argument, input, is_grad_enabled};
use crate::{Error, Result};
use candle_core::{Module, ModuleT, Tensor};
use candle_ddp_nn::Autocast;
use candle_nn::VarBuilder;
use std::panic::Location;

impl<M> DistributedDataParallel<M> {
    /// Runs `f` on the model, with every parameter up to date: for a model's own methods, such as
    /// `ddp.call(|net| net.generate(&x))`, and for forward passes that take other arguments than one tensor. PyTorch's
    /// `model.module`.
    ///
    /// There is no `ddp.module()`, since a reference that is kept would become stale: the model computes with copies of the
    /// variables, and only this, [`forward`](Self::forward) and [`forward_t`](Self::forward_t) update them after an optimizer's
    /// step. [`call_mut`](Self::call_mut) gives `&mut M`, and [`into_module`](Self::into_module) the model itself.
    ///
    /// Under [`no_grad`](crate::nn::no_grad) `f` gets the model of [`with_no_grad_model`](Self::with_no_grad_model), if there is
    /// one.
    ///
    /// Between a forward pass and its [`backward`](Self::backward), call this, [`forward`](Self::forward) and
    /// [`forward_t`](Self::forward_t) only while the variables do not change: after a change, for example by
    /// [`Ema::apply`](crate::optim::Ema::apply), that backward pass would use the new values.
    ///
    /// Under mixed precision, `f` gets its inputs as they are: convert them with
    /// [`cast_forward_inputs`](Self::cast_forward_inputs). Under [`Precision::Autocast`], functions cast them.
    ///
    /// Under [`sharding`](crate::DdpOptions::sharding), a parameter that `f` returns is freed, and its use is then an error: return
    /// `weight.copy()?`, which keeps its values. (candle's `save_safetensors`, and `slice_set` of two such tensors, panic instead of
    /// returning candle's error.)
    ///
    /// # Errors
    /// The errors of `f`.
    #[track_caller]
    pub fn call<T, E>(&self, f: impl FnOnce(&M) -> std::result::Result<T, E>) -> Result<T>
    where
        Error: From<E>,
    {
        let module = self.no_grad_module.as_ref().filter(|_| !is_grad_enabled());
        self.core.begin_forward(module.is_some())?;
        let f = || self.core.options.precision.run(|| f(module.unwrap_or(&self.module)));
        let result = CallSite::around(Location::caller(), || self.core.phase("forward", f));
        self.core.end_forward();
        result.map_err(|error| self.explain(error.into()))
    }

    /// Like [`call`](Self::call), for what changes the model: a forward pass that takes `&mut self`, a cache to be emptied, a mode.
    /// It is for state outside of variables; a tensor that replaces a parameter would be neither averaged nor saved.
    ///
    /// A guard of [`no_sync`](Self::no_sync), [`sync_if`](Self::sync_if) or [`freeze`](Self::freeze) borrows the model, and this
    /// needs it whole. If the two must meet, let the closure of [`new`](Self::new) return a `RefCell` of the model, and use `call`.
    ///
    /// # Errors
    /// The errors of `f`.
    #[track_caller]
    pub fn call_mut<T, E>(&mut self, f: impl FnOnce(&mut M) -> std::result::Result<T, E>) -> Result<T>
    where
        Error: From<E>,
    {
        let Self { module, no_grad_module, core } = self;
        let no_grad_module = no_grad_module.as_mut().filter(|_| !is_grad_enabled());
        core.begin_forward(no_grad_module.is_some())?;
        let f = || core.options.precision.run(|| f(no_grad_module.unwrap_or(module)));
        let result = CallSite::around(Location::caller(), || core.phase("forward", f));
        core.end_forward();
        result.map_err(|error| self.explain(error.into()))
    }

    /// Ends DistributedDataParallel and returns the model with the parameters' last values: to merge adapters into its weights, or
    /// to use it in another way. It no longer follows the variables.
    ///
    /// Its parameters still are replicas, so `loss.backward()` through them is [`Error::BackwardOutside`]. To train on without DDP,
    /// build the model from the same `VarMap`.
    ///
    /// # Errors
    /// The errors of the last copies of the variables; [`Error::InvalidArgument`] under sharding.
    pub fn into_module(self) -> Result<M> {
        self.core.check_whole(Feature::WholeModel)?;
        self.core.begin_forward(false)?;
        Ok(self.module)
    }

    /// Builds the model a second time, from tensors that candle does not track. Under [`no_grad`](crate::nn::no_grad),
    /// [`forward`](Self::forward), [`forward_t`](Self::forward_t) and [`call`](Self::call) then use this model, in which no
    /// operation records a graph.
    ///
    /// Under `no_grad` the layers of [`nn`](crate::nn) record nothing anyway. But candle's own operations, and with them
    /// candle_nn's layers, record whenever one of their arguments is a parameter, and then keep the activations of the whole
    /// forward pass. A model in which a parameter meets such an operation needs this:
    ///
    /// ```
    /// # use candle_core::{DType, Tensor};
    /// # use candle_ddp::{DistributedDataParallel, nn::no_grad};
    /// # use candle_nn::{VarBuilder, VarMap, linear};
    /// # fn main() -> candle_ddp::Result<()> {
    /// # candle_ddp::spawn(2, |pg| {
    /// # let varmap = VarMap::new();
    /// # let x = Tensor::ones((1, 4), DType::F32, pg.device())?;
    /// let build = |vb: VarBuilder<'static>| linear(4, 2, vb); // candle's
    /// let ddp = DistributedDataParallel::new(&pg, &varmap, build)?.with_no_grad_model(build)?;
    /// let y = no_grad(|| ddp.forward(&x))?;
    /// # assert!(!y.track_op());
    /// # Ok(())
    /// # })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Both models have the same memory: this one computes with the variables themselves, and always sees their last values. (Under
    /// [`Precision::Half`] it shares the converted copies.) Buffers and [ignored](crate::Role::Ignored)
    /// variables are the same in both. Nothing is sent, so ranks need not call it together.
    ///
    /// **State outside of variables is not shared**: what the model keeps in a `RefCell`, or draws at random in its constructor and
    /// keeps in a plain tensor, exists twice. Such a model must not have this, or must request that state from the `VarBuilder`.
    ///
    /// # Errors
    /// The errors of `build`; [`Error::Parameter`] if it does not request all variables of the model; an error for a variable
    /// that the model does not have.
    pub fn with_no_grad_model<E>(
        mut self,
        build: impl FnOnce(VarBuilder<'static>) -> std::result::Result<M, E>,
    ) -> Result<Self>
    where
        Error: From<E>,
    {
        self.core.check_whole(Feature::NoGradModel)?;
        self.no_grad_module = Some(no_grad::build(&self.core, build)?);
        Ok(self)
    }

    /// Adds an explanation to an error about two dtypes, under mixed precision and autocast.
    fn explain(&self, error: Error) -> Error {
        let error = match error {
            Error::Candle(error) if is_dtype_mismatch(&error) => error,
            error => return error,
        };
        let explanation = match self.core.options.precision {
            Precision::Half { param_dtype: dtype, .. } => format!(
                "under Precision::Half the model computes in {}, and only `ddp.forward` and `ddp.forward_t` convert their \
                 input: in `ddp.call`, convert each input with `ddp.cast_forward_inputs(&x)?`",
                dtype.as_str()
            ),
            Precision::Autocast(Autocast::Lists(dtype)) => format!(
                "under autocast the results of products are {}, and candle's own operations take one dtype: use `nn::add` for sums, \
                 convert with `to_dtype`, or take `Autocast::Products`",
                dtype.as_str()
            ),
            _ => return Error::Candle(error),
        };
        Error::Candle(error.context(explanation))
    }

    /// The model's forward pass on `xs`, which mixed precision converts. In evaluation, call it inside of
    /// [`no_grad`](crate::nn::no_grad): then the result has no graph, and no activations are kept.
    ///
    /// # Errors
    /// The errors of the model.
    #[track_caller]
    pub fn forward(&self, xs: &Tensor) -> Result<Tensor>
    where
        M: Module,
    {
        let xs = self.cast_forward_inputs(&input(xs)?)?;
        self.call(|module| self.core.own(module.forward(&xs)?)).map(|result| self.without_graph(result))
    }

    /// The model's forward pass on `xs`, which mixed precision converts, in training or evaluation mode. As with PyTorch's `eval`,
    /// the mode is about layers such as dropout and batch normalisation, and gradients flow in both: an evaluation without a
    /// backward pass is `no_grad(|| ddp.forward_t(&xs, false))`.
    ///
    /// # Errors
    /// The errors of the model.
    #[track_caller]
    pub fn forward_t(&self, xs: &Tensor, train: bool) -> Result<Tensor>
    where
        M: ModuleT,
    {
        let xs = self.cast_forward_inputs(&input(xs)?)?;
        self.call(|module| self.core.own(module.forward_t(&xs, train)?)).map(|result| self.without_graph(result))
    }

    /// The model's input for `xs`: under [`Precision::Half`] a tensor of `param_dtype`,
    /// in the same [memory format](crate::nn::MemoryFormat), unless it holds integers; otherwise `xs` itself. [`forward`](Self::forward) and [`forward_t`](Self::forward_t) do this; use
    /// it with [`call`](Self::call). FSDP's `MixedPrecision.cast_forward_inputs`.
    ///
    /// # Errors
    /// The errors of candle's conversion.
    pub fn cast_forward_inputs(&self, xs: &Tensor) -> Result<Tensor> {
        match self.core.options.precision.param_dtype() {
            Some(dtype) if xs.dtype().is_float() => Ok(MemoryFormat::of(xs).to_dtype(xs, dtype)?),
            _ => Ok(xs.clone()),
        }
    }

    /// The result of a forward pass, under `no_grad` without the graph that candle's own operations have recorded.
    fn without_graph(&self, result: Tensor) -> Tensor {
        if !is_grad_enabled() && result.track_op() {
            self.core.warn_of_graph();
        }
        argument(&result)
    }
}

/// Allows `xs.apply_t(&ddp, train)` and calls of every function that takes a module. (candle makes every `Module` a
/// `ModuleT`, so a wrapper can only implement one of the two.)
impl<M: ModuleT> ModuleT for DistributedDataParallel<M> {
    fn forward_t(&self, xs: &Tensor, train: bool) -> candle_core::Result<Tensor> {
        Ok(self.forward_t(xs, train)?)
    }
}

/// Whether candle refused to combine tensors of two dtypes.
fn is_dtype_mismatch(error: &candle_core::Error) -> bool {
    use candle_core::Error::{Context, DTypeMismatchBinaryOp, WithBacktrace, WithPath};
    match error {
        DTypeMismatchBinaryOp { .. } => true,
        Context { inner, .. } | WithBacktrace { inner, .. } | WithPath { inner, .. } => is_dtype_mismatch(inner),
        _ => false,
    }
}
