//! How a model is wrapped.
use crate::ddp::blocks::Construction;
use crate::ddp::model::DistributedModel;
use crate::ddp::model::parameter::{Buffer, Frozen, HeldAs, Parameter, Variables};
use crate::ddp::model::registry::Registry;
use crate::ddp::pass::graph::Registration;
use crate::ddp::{DdpOptions, DistributedDataParallel, Precision, Reducer, Role, Sharding};
use crate::goes_with::Feature;
use crate::process_group::ProcessGroup;
use crate::variables::{Parameters, check_named};
use crate::{Error, Result};
use candle_core::DType;
use candle_nn::{VarBuilder, VarMap};
use std::collections::HashSet;
use std::sync::Arc;

impl<M> DistributedDataParallel<M> {
    /// Builds a model whose f32 variables live in `varmap`, on the device of `group`; missing variables are created. Every rank
    /// must call this, and starts with rank 0's values. [`with_options`](Self::with_options) takes another dtype, mixed
    /// precision and more.
    ///
    /// If the group works on GPUs, a part of the model may be on the CPU: `vb.set_device(Device::Cpu)`.
    ///
    /// A closure that ends in `Ok(…)` must name its error type:
    ///
    /// ```
    /// # use candle_ddp::DistributedDataParallel;
    /// # use candle_nn::{Linear, VarBuilder, VarMap, linear};
    /// struct Net(Linear);
    ///
    /// # fn main() -> candle_ddp::Result<()> {
    /// # candle_ddp::spawn(2, |pg| {
    /// let build = |vb: VarBuilder| {
    ///     let head = linear(4, 2, vb.pp("head"))?;
    ///     Ok::<_, candle_core::Error>(Net(head))
    /// };
    /// let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), build)?;
    /// # assert_eq!(ddp.parameters().len(), 2);
    /// # Ok(())
    /// # })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Returns the same error on every rank: [`Error::RankFailed`] if `build` failed on one of them,
    /// [`Error::Mismatch`] with the first difference if they built different models or gave different options.
    pub fn new<E>(
        group: &ProcessGroup,
        varmap: &VarMap,
        build: impl FnOnce(VarBuilder<'static>) -> std::result::Result<M, E>,
    ) -> Result<Self>
    where
        Error: From<E>,
    {
        Self::with_options(group, varmap, build, DdpOptions::default())
    }

    /// Like [`new`](Self::new), with options. [`DdpOptions::precision`] has the dtype of the variables, and says in which the model computes.
    ///
    /// # Errors
    /// See [`new`](Self::new).
    pub fn with_options<E>(
        group: &ProcessGroup,
        varmap: &VarMap,
        build: impl FnOnce(VarBuilder<'static>) -> std::result::Result<M, E>,
        options: DdpOptions,
    ) -> Result<Self>
    where
        Error: From<E>,
    {
        let groups = options.sharding.groups(group)?;
        let construction = match options.sharding {
            Sharding::Blocks { reshard_after_forward, .. } => {
                Some(Construction::new(&groups, varmap, reshard_after_forward)?)
            }
            Sharding::Off | Sharding::Optimizer { .. } => None,
        };
        let reducer = Arc::new(Reducer::new(groups));
        let registry = Registry::new(varmap.clone(), Arc::clone(&reducer), options.clone(), construction.clone());
        let builder =
            VarBuilder::from_backend(Box::new(registry.clone()), options.precision.held_as(), group.device().clone());
        let build = || match &construction {
            Some(construction) => construction.during(|| build(builder)),
            None => build(builder),
        };
        let built = options.check_precision().and_then(|()| Ok(build()?));
        if construction.as_ref().is_some_and(Construction::has_failed) {
            let reason = "a block could not be built, and the model hides the error";
            return Err(built.err().unwrap_or_else(|| Error::invalid("model", reason)));
        }
        let blocks = construction.filter(|_| built.is_ok()).map(|construction| construction.finish()).transpose()?;
        let (module, core) = DistributedModel::connect(reducer, built, registry.seal(), blocks, options)?;
        Ok(Self { module, no_grad_module: None, core: Box::new(core) })
    }

    /// Wraps a model that was not built from a `VarBuilder` and computes with the variables themselves, given with
    /// their names. Its gradients enter the buckets only after the backward pass, so communication does not overlap it,
    /// and a `loss.backward()` instead of [`backward`](Self::backward) goes unnoticed.
    ///
    /// `vars` are all variables with their names, such as a `&VarMap`. Their order has no meaning: they are sorted by name.
    ///
    /// # Errors
    /// Returns the errors of [`new`](Self::new); [`Error::Parameter`] for a name that is given twice;
    /// [`Error::InvalidArgument`] for variables without names.
    pub fn from_vars(
        group: &ProcessGroup,
        module: M,
        vars: impl Into<Parameters>,
        options: DdpOptions,
    ) -> Result<Self> {
        let Parameters { variables: mut vars, named } = vars.into();
        vars.sort_by(|(a, _), (b, _)| a.cmp(b));
        let reducer = Arc::new(Reducer::new(options.sharding.groups(group)?));
        let mut variables = Variables::default();
        let (mut names, mut ids) = (HashSet::new(), HashSet::new());
        let mut built = options.check_precision().and_then(|()| check_named(named, "DDP")).map(|()| module);
        if !matches!(options.precision, Precision::Pure(DType::F32) | Precision::Autocast(_)) {
            let reason = "a model of `from_vars` computes with the variables themselves, in their own dtypes: leave it at its default, take \
                          Autocast, or build the model with `with_options`";
            built = Err(Error::invalid("precision", reason));
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
        if matches!(options.sharding, Sharding::Blocks { .. }) {
            built = built.and_then(|module| Feature::FromVars.goes_with(Feature::ShardedBlocks).map(|()| module));
        }
        let (module, core) = DistributedModel::connect(reducer, built, variables, None, options)?;
        Ok(Self { module, no_grad_module: None, core: Box::new(core) })
    }
}

/// All [`named_parameters`](DistributedDataParallel::named_parameters), also the ignored ones.
impl<M> From<&DistributedDataParallel<M>> for Parameters {
    fn from(ddp: &DistributedDataParallel<M>) -> Self {
        ddp.named_parameters().into()
    }
}
