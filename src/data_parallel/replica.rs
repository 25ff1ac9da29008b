//! A model on each device, and the `VarBuilder` with which it is built.
use super::device::device_name;
use super::scatter_gather::transfer_whole;
use crate::kernels;
use crate::panic::lock;
use crate::variables::{check_shared, not_in_varmap};
use crate::{Error, Result};
use candle_core::{DType, Device, DeviceLocation, Shape, Tensor, Var};
use candle_ddp_base::debug_fields;
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{VarBuilder, VarMap};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// A model on one of several devices.
pub struct Replica<M> {
    module: M,
    local_variables: Arc<DeviceVariables>,
}

/// A replica's device and variables.
pub(super) struct DeviceVariables {
    pub(super) device: Device,
    /// The variables in the order in which the model requested them.
    pub(super) variables: Vec<Variable>,
}

/// A variable on the first device, and the replica's counterpart: the same variable, or a copy on the replica's device.
pub(super) struct Variable {
    pub(super) name: String,
    pub(super) var: Var,
    pub(super) local: Var,
}

impl<M> Replica<M> {
    /// Returns the model.
    pub fn module(&self) -> &M {
        &self.module
    }

    /// Returns the device on which the model computes.
    pub fn device(&self) -> &Device {
        &self.local_variables.device
    }

    /// Updates the copies from the variables. On GPUs, the copies are enqueued on this thread's streams.
    /// [`parallel_apply`] calls this after waiting for the variables, and waits for the copies before a replica
    /// computes.
    ///
    /// [`parallel_apply`]: super::parallel_apply
    pub(super) fn refresh(&self) -> Result<()> {
        let DeviceVariables { device, variables } = &*self.local_variables;
        let copies: Vec<_> = variables.iter().filter(|variable| variable.var.id() != variable.local.id()).collect();
        let moves: Vec<_> = copies.iter().map(|variable| (variable.var.as_detached_tensor(), device)).collect();
        for (new, Variable { name, local, .. }) in transfer_whole(&moves)?.iter().zip(copies) {
            local
                .set(new)
                .map_err(|error| Error::parameter(name, format!("its replica cannot be updated: {error}")))?;
        }
        Ok(())
    }

    pub(super) fn local_variables(&self) -> &Arc<DeviceVariables> {
        &self.local_variables
    }
}

debug_fields!(<M> Replica<M>: |this| device = this.device(), variables = this.local_variables.variables.len());

/// Builds a model on each of `devices`. Unlike PyTorch's `replicate`, which runs in every forward pass, this is done
/// once; [`parallel_apply`](super::parallel_apply) updates the replicas. The variables are those of `varmap`, on the
/// first device; missing ones are created with dtype `dtype`. Every replica must request the same variables.
///
/// # Errors
/// Returns [`Error::Parameter`] if a variable is not on the first device, an error if `devices` is empty,
/// contains a GPU twice, or contains several GPUs not made by `Device::new_cuda_with_stream`, and any error of `build`.
pub fn replicate<M, E>(
    devices: &[Device],
    varmap: &VarMap,
    dtype: DType,
    build: impl Fn(VarBuilder<'static>) -> std::result::Result<M, E>,
) -> Result<Vec<Replica<M>>>
where
    Error: From<E>,
{
    let Some(first) = devices.first() else {
        return Err(Error::invalid("devices", "there must be at least one device"));
    };
    check_distinct(&devices.iter().map(Device::location).collect::<Vec<_>>())?;
    check_streams(devices)?;
    devices.iter().try_for_each(kernels::keep_memory)?;
    let mut replicas: Vec<Replica<M>> = Vec::with_capacity(devices.len());
    for (index, device) in devices.iter().enumerate() {
        let builder = Builder {
            varmap: varmap.clone(),
            first: first.clone(),
            device: device.clone(),
            is_first: index == 0,
            registered: Arc::default(),
        };
        let module =
            build(VarBuilder::from_backend(Box::new(builder.clone()), dtype, device.clone())).map_err(Error::from)?;
        let local_variables = DeviceVariables { device: device.clone(), variables: builder.seal() };
        if let Some(replica) = replicas.first() {
            check_same(&replica.local_variables, &local_variables)?;
        }
        replicas.push(Replica { module, local_variables: Arc::new(local_variables) });
    }
    // The copies were enqueued on this thread's streams, and other threads will use them.
    for device in devices {
        device.synchronize()?;
    }
    Ok(replicas)
}

/// Two replicas on one GPU would share a cuBLAS handle between threads, without any benefit.
fn check_distinct(devices: &[DeviceLocation]) -> Result<()> {
    for (index, device) in devices.iter().enumerate() {
        if *device != DeviceLocation::Cpu && devices[..index].contains(device) {
            let reason = format!("{} is listed twice, but each GPU takes one part of the batch", device_name(*device));
            return Err(Error::invalid("devices", reason));
        }
    }
    Ok(())
}

/// One thread cannot use the default streams of several GPUs; see the README in this folder.
fn check_streams(devices: &[Device]) -> Result<()> {
    let gpus: Vec<_> = devices.iter().filter(|device| device.is_cuda()).collect();
    if gpus.len() < 2 {
        return Ok(());
    }
    for gpu in gpus {
        if !kernels::has_own_stream(gpu)? {
            let reason = format!(
                "{} uses its threads' default streams, so memory of one GPU could be freed on the stream of another: \
                 create all GPUs of a DataParallel with Device::new_cuda_with_stream(ordinal)",
                device_name(gpu.location())
            );
            return Err(Error::invalid("devices", reason));
        }
    }
    Ok(())
}

/// A replica that lacks a variable, or has an additional one, computes something else.
fn check_same(first: &DeviceVariables, other: &DeviceVariables) -> Result<()> {
    let names = |local_variables: &DeviceVariables| {
        local_variables.variables.iter().map(|variable| variable.name.clone()).collect::<Vec<_>>()
    };
    let (expected, found) = (names(first), names(other));
    let only = |a: &[String], b: &[String]| a.iter().find(|name| !b.contains(*name)).cloned();
    if expected.len() == found.len() && expected == found {
        return Ok(());
    }
    match only(&expected, &found).or_else(|| only(&found, &expected)) {
        Some(name) => {
            Err(Error::parameter(name, "not all replicas requested it: build the same model on every device"))
        }
        None => Ok(()), // the order does not matter here
    }
}

fn check_device(name: &str, expected: DeviceLocation, found: DeviceLocation) -> Result<()> {
    if expected == found {
        return Ok(());
    }
    let (expected, found) = (device_name(expected), device_name(found));
    let reason = format!(
        "module must have its parameters and buffers on device {expected} (devices[0]) but found one of them on device: \
         {found}. Make the variables of the VarMap on {expected}, or give {found} as the first device"
    );
    Err(Error::parameter(name, reason))
}

/// The data behind a replica's `VarBuilder`.
#[derive(Clone)]
struct Builder {
    varmap: VarMap,
    first: Device,
    device: Device,
    is_first: bool,
    registered: Arc<Mutex<Registered>>,
}

#[derive(Default)]
struct Registered {
    variables: Vec<Variable>,
    /// The variables returned so far, by name, so that repeated requests (tied weights) get the same tensor.
    handed_out: HashMap<String, Var>,
    sealed: bool,
}

impl Builder {
    /// Takes the requested variables once the model is built. From now on, only known names are returned.
    fn seal(&self) -> Vec<Variable> {
        let mut registered = lock(&self.registered);
        registered.sealed = true;
        std::mem::take(&mut registered.variables)
    }

    fn known(&self, name: &str) -> Option<Var> {
        lock(self.varmap.data()).get(name).cloned()
    }

    fn hand_out(&self, registered: &mut Registered, name: &str, var: Var) -> candle_core::Result<Tensor> {
        check_device(name, self.first.location(), var.device().location())?;
        // Even if both devices are the CPU, the replica needs its own storage, because its forward pass may write to
        // buffers.
        let local = if self.is_first {
            var.clone()
        } else {
            let moved = transfer_whole(&[(var.as_detached_tensor(), &self.device)])?;
            Var::from_tensor(&moved[0])?
        };
        registered.variables.push(Variable { name: name.to_string(), var, local: local.clone() });
        registered.handed_out.insert(name.to_string(), local.clone());
        Ok(local.as_tensor().clone())
    }
}

fn bail_if_sealed(registered: &Registered, name: &str) -> candle_core::Result<()> {
    if registered.sealed {
        candle_core::bail!(
            "{name} was requested after DataParallel was built: request every variable while the model is constructed, \
             so that all devices have it"
        )
    }
    Ok(())
}

impl SimpleBackend for Builder {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: candle_nn::Init,
        dtype: DType,
        _: &Device,
    ) -> candle_core::Result<Tensor> {
        let mut registered = lock(&self.registered);
        if let Some(var) = registered.handed_out.get(name) {
            check_shared(name, var, dtype, &shape)?;
            return Ok(var.as_tensor().clone());
        }
        bail_if_sealed(&registered, name)?;
        let var = Var::from_tensor(&self.varmap.get(shape, name, init, dtype, &self.first)?)?;
        self.hand_out(&mut registered, name, var)
    }

    /// Works for variables that are already in the VarMap.
    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        let mut registered = lock(&self.registered);
        if let Some(var) = registered.handed_out.get(name) {
            return Ok(var.as_tensor().clone());
        }
        bail_if_sealed(&registered, name)?;
        match self.known(name) {
            Some(var) => self.hand_out(&mut registered, name, var),
            None => Err(not_in_varmap(name)),
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.known(name).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The error text is PyTorch's.
    #[test]
    fn a_variable_on_another_device_is_named() {
        let (cpu, gpu) = (DeviceLocation::Cpu, DeviceLocation::Cuda { gpu_id: 1 });
        check_device("fc.weight", gpu, gpu).unwrap();
        let error = check_device("fc.weight", cpu, gpu).unwrap_err().to_string();
        let sentence = "parameter fc.weight: module must have its parameters and buffers on device cpu (devices[0]) but \
                        found one of them on device: cuda:1";
        assert!(error.starts_with(sentence), "{error}");
        assert!(check_device("w", gpu, DeviceLocation::Cuda { gpu_id: 0 }).is_err());
    }

    #[test]
    fn a_gpu_may_be_in_the_list_once() {
        let gpu = |gpu_id| DeviceLocation::Cuda { gpu_id };
        check_distinct(&[gpu(0), gpu(1), DeviceLocation::Cpu, DeviceLocation::Cpu]).unwrap();
        let error = check_distinct(&[gpu(0), gpu(1), gpu(0)]).unwrap_err().to_string();
        assert!(error.contains("cuda:0"), "{error}");
    }
}
