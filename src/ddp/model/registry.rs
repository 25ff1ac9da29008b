//! The `VarBuilder` that a model is built with under DDP: it hands out replicas and records what was requested.
use crate::ddp::blocks::Construction;
use crate::ddp::model::options::{DdpOptions, Role};
use crate::ddp::model::parameter::{Buffer, Frozen, HeldAs, Parameter, Variables};
use crate::ddp::model::replica;
use crate::ddp::reducer::Reducer;
use crate::panic::lock;
use crate::placement::Placement;
use crate::tensor::copy;
use crate::variables::{check_shared, not_in_varmap};
use crate::{Error, Result};
use candle_core::{DType, Device, Shape, Tensor, Var};
use candle_ddp_state::seed;
use candle_nn::VarMap;
use candle_nn::var_builder::SimpleBackend;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

/// The requests of a model so far, in order; that order numbers the parameters.
#[derive(Default)]
pub(in crate::ddp) struct Registered {
    variables: Variables,
    /// The tensor for each name, so that a name requested twice (tied weights) gets the same one.
    handed_out: HashMap<String, Tensor>,
    sealed: bool,
}

/// A handle to the registry; the model's `VarBuilder` holds another.
#[derive(Clone)]
pub(in crate::ddp) struct Registry {
    varmap: VarMap,
    reducer: Arc<Reducer>,
    options: DdpOptions,
    /// Under sharding.
    construction: Option<Construction>,
    registered: Arc<Mutex<Registered>>,
}

impl Registry {
    pub(in crate::ddp) fn new(
        varmap: VarMap,
        reducer: Arc<Reducer>,
        options: DdpOptions,
        construction: Option<Construction>,
    ) -> Self {
        Self { varmap, reducer, options, construction, registered: Arc::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Registered> {
        lock(&self.registered)
    }

    /// Ends the construction and returns what the model requested. From now on only known names are handed out.
    pub(in crate::ddp) fn seal(&self) -> Variables {
        let mut registered = self.lock();
        registered.sealed = true;
        let mut variables = std::mem::take(&mut registered.variables);
        if self.construction.is_none() {
            return variables;
        }
        // Their blocks have replaced the stand-ins by this rank's pieces.
        let pieces = lock(self.varmap.data());
        let frozen = variables.frozen.iter_mut().map(|frozen| (&frozen.name, &mut frozen.var));
        let parameters = variables.parameters.iter_mut().map(|parameter| (&parameter.name, &mut parameter.var));
        for (name, var) in parameters.chain(frozen) {
            if let Some(piece) = pieces.get(name) {
                *var = piece.clone();
            }
        }
        drop(pieces);
        variables
    }

    /// The dtypes of a variable that the model requests as `asked`, and of the tensor that the model gets for it (None:
    /// the variable's own dtype).
    fn dtypes(&self, name: &str, asked: DType) -> (DType, Option<DType>) {
        let precision = self.options.precision;
        // A layer that requests another dtype than its VarBuilder's has a reason for it.
        let usual = precision.param_dtype() == Some(asked);
        match self.options.role(name, asked) {
            Role::Parameter | Role::Frozen if usual => (precision.variables(), Some(asked)),
            Role::Buffer if asked.is_float() && (usual || asked == precision.variables()) => {
                (precision.buffer_dtype().unwrap_or(precision.variables()), None)
            }
            _ => (asked, None),
        }
    }

    /// Registers the variable `name`, requested with these [`dtypes`](Self::dtypes), and returns what the model gets for it.
    fn hand_out(
        &self,
        registered: &mut Registered,
        name: &str,
        var: Var,
        (stored, held): (DType, Option<DType>),
    ) -> candle_core::Result<Tensor> {
        if registered.sealed {
            candle_core::bail!(
                "{name} was requested after DistributedDataParallel was built: request every variable while the model \
                 is constructed, so that all ranks know all parameters"
            )
        }
        let tensor = match self.options.role(name, var.dtype()) {
            Role::Buffer => {
                if let Some(dtype) = self.options.precision.buffer_dtype()
                    && var.dtype().is_float()
                    && var.dtype() != dtype
                {
                    let reason = format!(
                        "it is a buffer of dtype {} in the VarMap, but buffer_dtype is {}: convert it \
                         in the VarMap, or leave buffer_dtype unset",
                        var.dtype().as_str(),
                        dtype.as_str()
                    );
                    return Err(Error::parameter(name, reason).into());
                }
                registered.variables.buffers.push(Buffer { name: name.to_string(), var: var.clone() });
                var.as_tensor().clone()
            }
            Role::Ignored => {
                registered.variables.ignored.push(Buffer { name: name.to_string(), var: var.clone() });
                var.as_tensor().clone()
            }
            Role::Frozen => {
                // A tensor without an operation is not part of candle's backward pass.
                let shared = match self.construction {
                    // It does not stay in memory.
                    Some(_) => var.to_dtype(held.unwrap_or(var.dtype()))?.copy()?.detach(),
                    None => var.detach(),
                };
                let converted =
                    held.filter(|held| *held != shared.dtype()).map(|held| shared.to_dtype(held)).transpose()?;
                let tensor = converted.clone().unwrap_or(shared);
                let var = self.stand_in(name, &tensor, false, var)?;
                registered.variables.frozen.push(Frozen { name: name.to_string(), var, converted });
                tensor
            }
            Role::Parameter => {
                if var.dtype() != stored {
                    let (is, needed) = (var.dtype().as_str(), stored.as_str());
                    let reason = format!(
                        "it is {is} in the VarMap, but the model is built with variables of dtype {needed} \
                         (DdpOptions.precision, unless its layer asks for another): convert it in the VarMap, or let \
                         DdpOptions.precision be Pure({is})"
                    );
                    return Err(Error::parameter(name, reason).into());
                }
                let index = registered.variables.parameters.len();
                let dtype = held.unwrap_or(var.dtype());
                let copy = copy::snapshot_tensor(&var, dtype)?;
                let token_of = if self.construction.is_some() { empty(&var)? } else { var.clone() };
                let replica = replica::replicate(&token_of, copy, Arc::clone(&self.reducer), index, name)?;
                let var = self.stand_in(name, &replica, true, var)?;
                let held = HeldAs::Replica(replica.clone());
                registered.variables.parameters.push(Parameter { name: name.to_string(), var, held });
                replica
            }
        };
        registered.handed_out.insert(name.to_string(), tensor.clone());
        Ok(tensor)
    }

    /// The variable itself, or under sharding one without elements until its block is complete. The model holds `tensor`.
    fn stand_in(&self, name: &str, tensor: &Tensor, is_trained: bool, var: Var) -> candle_core::Result<Var> {
        let Some(construction) = &self.construction else { return Ok(var) };
        let stand_in = empty(&var)?;
        construction.request(name, is_trained, tensor, var);
        Ok(stand_in)
    }

    /// Refuses a variable of a sharded model that was built before.
    fn check_whole(&self, name: &str) -> Result<()> {
        if lock(self.varmap.data()).get(name).is_none_or(|var| !Placement::of(var).is_sharded()) {
            return Ok(());
        }
        let reason = "the VarMap has this rank's piece of it, since a model was built with it under DdpOptions.sharding: build the model \
                      with a new VarMap, and load a checkpoint. Under elastic::run, make the VarMap in the training loop, and commit it there";
        Err(Error::parameter(name, reason))
    }

    /// The tensor that was handed out before.
    fn again(&self, registered: &Registered, name: &str) -> candle_core::Result<Option<Tensor>> {
        if let Some(construction) = &self.construction {
            construction.check_again(name)?;
        }
        Ok(registered.handed_out.get(name).cloned())
    }
}

/// A variable of the same dtype and device, without elements.
fn empty(var: &Var) -> candle_core::Result<Var> {
    Var::zeros(0, var.dtype(), var.device())
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
        if let Some(tensor) = self.again(&registered, name)? {
            check_shared(name, &tensor, dtype, &shape)?;
            return Ok(tensor);
        }
        self.check_whole(name)?;
        let dtypes = self.dtypes(name, dtype);
        let var =
            Var::from_tensor(&seed::get(&self.varmap, self.options.init_seed, shape, name, init, dtypes.0, device)?)?;
        self.hand_out(&mut registered, name, var, dtypes)
    }

    /// Works only for variables that are already in the VarMap.
    fn get_unchecked(&self, name: &str, dtype: DType, _: &Device) -> candle_core::Result<Tensor> {
        let mut registered = self.lock();
        if let Some(tensor) = self.again(&registered, name)? {
            return Ok(tensor);
        }
        self.check_whole(name)?;
        let var = lock(self.varmap.data()).get(name).cloned();
        match var {
            Some(var) => self.hand_out(&mut registered, name, var, self.dtypes(name, dtype)),
            None => Err(not_in_varmap(name)),
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        lock(self.varmap.data()).contains_key(name)
    }
}
