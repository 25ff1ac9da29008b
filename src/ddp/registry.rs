//! The `VarBuilder` that a model is built with under DDP: it hands out replicas and writes down what was asked for.
use super::bucket::ParameterInfo;
use super::hook;
use super::reducer::Reducer;
use super::{Buffer, DdpOptions, Parameter};
use crate::Error;
use crate::error::describe;
use candle_core::{DType, Device, Shape, Tensor, Var};
use candle_nn::VarMap;
use candle_nn::var_builder::SimpleBackend;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What a model has asked for so far, in the order in which it asked: that order numbers the parameters.
#[derive(Default)]
pub(super) struct Registered {
    pub(super) parameters: Vec<Parameter>,
    pub(super) buffers: Vec<Buffer>,
    pub(super) ignored: Vec<Buffer>,
    /// What was handed out under each name, so that a name asked for twice (tied weights) gets the same tensor.
    handed_out: HashMap<String, Tensor>,
    sealed: bool,
}

/// A handle to the registry; the model's `VarBuilder` holds another.
#[derive(Clone)]
pub(super) struct Registry {
    varmap: VarMap,
    reducer: Arc<Reducer>,
    options: DdpOptions,
    /// What variables are made of, where the model does not ask for something else.
    dtype: DType,
    registered: Arc<Mutex<Registered>>,
}

impl Registry {
    pub(super) fn new(varmap: VarMap, reducer: Arc<Reducer>, options: DdpOptions, dtype: DType) -> Self {
        Self { varmap, reducer, options, dtype, registered: Arc::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Registered> {
        self.registered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The model is built: takes what it asked for. From now on only known names are handed out.
    pub(super) fn seal(&self) -> (Vec<Parameter>, Vec<Buffer>, Vec<Buffer>) {
        let mut registered = self.lock();
        registered.sealed = true;
        let Registered { parameters, buffers, ignored, .. } = &mut *registered;
        (std::mem::take(parameters), std::mem::take(buffers), std::mem::take(ignored))
    }

    /// The dtypes of a variable that the model asks for as `asked` and of the tensor that the model gets for it (None:
    /// the variable's, whatever it is).
    fn dtypes(&self, name: &str, asked: DType) -> (DType, Option<DType>) {
        let mixed = self.options.mixed_precision.unwrap_or_default();
        // A layer that asks for another dtype than its VarBuilder's wants it for good reason.
        let usual = mixed.param_dtype == Some(asked);
        match self.options.role(name, asked) {
            Role::Parameter if usual => (self.dtype, Some(asked)),
            Role::Buffer if asked.is_float() && (usual || asked == self.dtype) => {
                (mixed.buffer_dtype.unwrap_or(self.dtype), None)
            }
            _ => (asked, None),
        }
    }

    /// Registers the variable `name`, and returns what the model gets for it: a tensor of dtype `held`, if that is given.
    fn hand_out(
        &self,
        registered: &mut Registered,
        name: &str,
        var: Var,
        held: Option<DType>,
    ) -> candle_core::Result<Tensor> {
        if registered.sealed {
            candle_core::bail!(
                "{name} was asked for after DistributedDataParallel was built: ask for every variable while the model \
                 is constructed, so that all ranks know all parameters"
            )
        }
        let tensor = match self.options.role(name, var.dtype()) {
            Role::Buffer => {
                if let Some(dtype) = self.options.mixed_precision.unwrap_or_default().buffer_dtype
                    && var.dtype().is_float()
                    && var.dtype() != dtype
                {
                    let reason = format!(
                        "it is a buffer of dtype {} in the VarMap, where mixed_precision.buffer_dtype says {}: \
                         convert it there, or leave buffer_dtype unset",
                        var.dtype().as_str(),
                        dtype.as_str()
                    );
                    return Err(Error::parameter(name, reason).into());
                }
                registered.buffers.push(Buffer { name: name.to_string(), var: var.clone() });
                var.as_tensor().clone()
            }
            Role::Ignored => {
                registered.ignored.push(Buffer { name: name.to_string(), var: var.clone() });
                var.as_tensor().clone()
            }
            Role::Parameter => {
                let index = registered.parameters.len();
                let replica = hook::replicate(&var, held.unwrap_or(var.dtype()), Arc::clone(&self.reducer), index)?;
                registered.parameters.push(Parameter { name: name.to_string(), var, replica: Some(replica.clone()) });
                replica
            }
        };
        registered.handed_out.insert(name.to_string(), tensor.clone());
        Ok(tensor)
    }
}

/// How DDP treats a variable.
pub(super) enum Role {
    /// Its gradient is averaged over the ranks.
    Parameter,
    /// It has no gradient; rank 0's value is broadcast.
    Buffer,
    /// It is each rank's own business.
    Ignored,
}

impl Parameter {
    /// The dtype with which the model computes.
    pub(super) fn held_as(&self) -> DType {
        self.replica.as_ref().map_or(self.var.dtype(), Tensor::dtype)
    }

    pub(super) fn info(&self, reduce_dtype: Option<DType>) -> ParameterInfo {
        ParameterInfo {
            name: self.name.clone(),
            shape: self.var.shape().clone(),
            dtype: reduce_dtype.unwrap_or(self.held_as()),
            arrives_as: self.held_as(),
            leaves_as: self.var.dtype(),
            device: self.var.device().clone(),
        }
    }
}

/// A variable that was handed out as `tensor` is asked for once more (tied weights).
pub(crate) fn check_shared(name: &str, tensor: &Tensor, dtype: DType, shape: &Shape) -> candle_core::Result<()> {
    if tensor.shape() != shape {
        candle_core::bail!(
            "{name} was asked for as {} and as {}: a shared variable has one shape",
            describe(tensor.dtype(), tensor.shape()),
            describe(dtype, shape)
        )
    }
    Ok(())
}

/// A variable that is asked for without a shape has to be there.
pub(crate) fn not_in_varmap(name: &str) -> candle_core::Error {
    candle_core::Error::msg(format!("{name} is not in the VarMap: give its shape, with `get`, so that it can be made"))
}

impl SimpleBackend for Registry {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: candle_nn::Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let mut registered = self.lock();
        if let Some(tensor) = registered.handed_out.get(name) {
            check_shared(name, tensor, dtype, &shape)?;
            return Ok(tensor.clone());
        }
        let (stored, held) = self.dtypes(name, dtype);
        let var = Var::from_tensor(&self.varmap.get(shape, name, init, stored, device)?)?;
        self.hand_out(&mut registered, name, var, held)
    }

    /// Works for variables that are already in the VarMap.
    fn get_unchecked(&self, name: &str, dtype: DType, _: &Device) -> candle_core::Result<Tensor> {
        let mut registered = self.lock();
        if let Some(tensor) = registered.handed_out.get(name) {
            return Ok(tensor.clone());
        }
        let var = self.varmap.data().lock().unwrap_or_else(PoisonError::into_inner).get(name).cloned();
        match var {
            Some(var) => self.hand_out(&mut registered, name, var, self.dtypes(name, dtype).1),
            None => Err(not_in_varmap(name)),
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.varmap.data().lock().unwrap_or_else(PoisonError::into_inner).contains_key(name)
    }
}
