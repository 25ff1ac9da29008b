//! The model that computes under `no_grad`.
use crate::ddp::model::DistributedModel;
use crate::ddp::model::parameter::{Buffer, Frozen, Parameter};
use crate::panic::lock;
use crate::variables::{check_shared, not_in_model};
use crate::{Error, Result};
use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::VarBuilder;
use candle_nn::var_builder::SimpleBackend;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};

impl Parameter {
    /// A tensor of the parameter's current value that candle does not track: the variable's memory or, if the model computes in
    /// another dtype, the replica's, which must be kept up to date.
    fn untracked(&self) -> Tensor {
        self.converted().unwrap_or(&self.var).detach()
    }

    /// The replica, if its dtype is not the variable's.
    pub(in crate::ddp) fn converted(&self) -> Option<&Tensor> {
        self.replica().filter(|replica| replica.dtype() != self.var.dtype())
    }
}

/// Builds a model of tensors that candle does not track. They share the memory of the variables, and buffers are the variables
/// themselves, since a layer may write to them.
pub(in crate::ddp) fn build<M, E>(
    model: &DistributedModel,
    build: impl FnOnce(VarBuilder<'static>) -> std::result::Result<M, E>,
) -> Result<M>
where
    Error: From<E>,
{
    let variables = &model.variables;
    let parameters = variables.parameters.iter().map(|parameter| (&parameter.name, parameter.untracked()));
    let frozen = variables.frozen.iter().map(|Frozen { name, var, converted }| {
        // As the model has it.
        (name, converted.clone().unwrap_or_else(|| var.detach()))
    });
    let buffers = variables.buffers.iter().chain(&variables.ignored);
    let buffers = buffers.map(|Buffer { name, var }| (name, var.as_tensor().clone()));
    let tensors = parameters.chain(frozen).chain(buffers).map(|(name, tensor)| (name.clone(), tensor)).collect();
    let untracked = Untracked { tensors: Arc::new(tensors), requested: Arc::default() };
    let device = model.group().device().clone();
    let module = build(VarBuilder::from_backend(Box::new(untracked.clone()), model.held_as(), device))?;
    let requested = lock(&untracked.requested);
    // The first in the model's order.
    let names = variables.parameters.iter().map(|parameter| &parameter.name);
    let names = names.chain(variables.frozen.iter().map(|frozen| &frozen.name));
    match names.chain(variables.buffers.iter().map(|buffer| &buffer.name)).find(|name| !requested.contains(*name)) {
        Some(name) => Err(Error::parameter(
            name,
            "the model for no_grad did not request it, so it would compute something else: build it as the model of \
             DistributedDataParallel was built",
        )),
        None => Ok(module),
    }
}

/// The data behind the model's `VarBuilder`.
#[derive(Clone)]
struct Untracked {
    tensors: Arc<HashMap<String, Tensor>>,
    requested: Arc<Mutex<HashSet<String>>>,
}

impl Untracked {
    fn tensor(&self, name: &str) -> candle_core::Result<Tensor> {
        let Some(tensor) = self.tensors.get(name) else { return Err(not_in_model(name)) };
        lock(&self.requested).insert(name.to_string());
        Ok(tensor.clone())
    }
}

impl SimpleBackend for Untracked {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: candle_nn::Init,
        dtype: DType,
        _: &Device,
    ) -> candle_core::Result<Tensor> {
        let tensor = self.tensor(name)?;
        check_shared(name, &tensor, dtype, &shape)?;
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        self.tensor(name)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }
}
