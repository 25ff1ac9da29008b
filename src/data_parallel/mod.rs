//! DataParallel: one process trains a model on several devices. Each device processes a part of every batch.
//!
//! As in PyTorch, [`DistributedDataParallel`](crate::DistributedDataParallel) with one process per device is faster: it
//! averages gradients during the backward pass, and no device has more work than the others. `DataParallel` is for
//! programs that must remain a single process.
//!
//! Its parts are public, as in PyTorch: [`replicate`], [`scatter`], [`parallel_apply`], [`gather`].
mod apply;
mod device;
mod graph;
mod replica;
mod scatter_gather;

pub use apply::parallel_apply;
pub use graph::backward;
pub use replica::{Replica, replicate};
pub use scatter_gather::{gather, scatter};

use crate::variables::{Parameters, is_batch_norm_buffer};
use crate::{Error, Result};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, DeviceLocation, Module, ModuleT, Tensor, Var};
use candle_ddp_base::debug_fields;
use candle_nn::{VarBuilder, VarMap};

/// A model that splits each batch over several devices: PyTorch's `DataParallel`.
///
/// The variables are in a `VarMap`, with the model's own names, on the first device. The model is built once per
/// device. On the first device it computes with the variables themselves, on the others with copies, which are updated
/// at the start of every forward pass, before any replica computes. A forward pass scatters its inputs over the
/// devices, runs all replicas concurrently, each on its own thread, and gathers their outputs on the output device. A
/// batch with fewer rows than devices uses only the first devices.
///
/// Gradients come from [`backward`](Self::backward), which also runs the replicas' backward passes concurrently and
/// sums their gradients on the first device. If the loss is the mean over the batch, they equal those of the model on a
/// single device. `loss.backward()` is an error.
///
/// Buffers that a forward pass changes (the running means of batch norms) keep the values of the first device's
/// replica; changes by the others are lost, as in PyTorch. Batch norms see only the rows of their device.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_ddp::data_parallel::DataParallel;
/// use candle_nn::{Optimizer, SGD, VarMap, linear, loss};
///
/// # fn main() -> candle_ddp::Result<()> {
/// let devices = [Device::Cpu, Device::Cpu]; // or Device::new_cuda_with_stream(0)? and (1)?
/// let varmap = VarMap::new();
/// let dp = DataParallel::new(&devices, &devices[0], &varmap, |vb| linear(4, 2, vb))?;
/// let mut optimizer = SGD::new(dp.parameters(), 0.1)?;
///
/// let (x, labels) = (Tensor::randn(0f32, 1.0, (10, 4), &Device::Cpu)?, Tensor::zeros(10, candle_core::DType::U32, &Device::Cpu)?);
/// let loss = dp.loss(&dp.forward(&x)?, &labels, loss::cross_entropy)?;
/// let grads = dp.backward(&loss)?;
/// optimizer.step(&grads)?;
/// # Ok(())
/// # }
/// ```
///
/// Several threads use the model, so it must be `Sync`, like candle's layers. `candle_nn::Sequential` is not: keep the
/// layers in a struct or a `Vec` instead.
///
/// The model must not compute something from a parameter during construction and keep the result, because that would
/// not follow the parameter, and must not request variables later. The list of devices may contain a GPU only once, but
/// the CPU several times.
pub struct DataParallel<M> {
    replicas: Vec<Replica<M>>,
    output_device: Device,
    /// A variable on which every output depends, so that candle's backward pass reaches the replicas.
    root: Var,
}

impl<M> DataParallel<M> {
    /// Builds the model on each of `devices`, with f32 variables in `varmap` on the first device; missing variables are
    /// created. Outputs are gathered on `output_device`; PyTorch's default is the first device.
    ///
    /// # Errors
    /// Returns [`Error::Parameter`] if a variable is not on the first device, an error if `devices` is empty,
    /// contains a GPU twice, or contains several GPUs not made by `Device::new_cuda_with_stream`, and any error of
    /// `build`.
    pub fn new<E>(
        devices: &[Device],
        output_device: &Device,
        varmap: &VarMap,
        build: impl Fn(VarBuilder<'static>) -> std::result::Result<M, E>,
    ) -> Result<Self>
    where
        Error: From<E>,
    {
        Self::with_dtype(devices, output_device, varmap, DType::F32, build)
    }

    /// Like [`new`](Self::new), with missing variables of this dtype.
    ///
    /// # Errors
    /// See [`new`](Self::new).
    pub fn with_dtype<E>(
        devices: &[Device],
        output_device: &Device,
        varmap: &VarMap,
        dtype: DType,
        build: impl Fn(VarBuilder<'static>) -> std::result::Result<M, E>,
    ) -> Result<Self>
    where
        Error: From<E>,
    {
        let replicas = replicate(devices, varmap, dtype, build)?;
        let root = Var::zeros((), DType::F32, output_device)?;
        Ok(Self { replicas, output_device: output_device.clone(), root })
    }

    /// Runs the backward pass through everything that `loss` depends on: this model's outputs, those of other
    /// `DataParallel` models, and ordinary variables. The same as the function [`backward`].
    ///
    /// # Errors
    /// Returns [`Error::Replica`], which names the device, if a replica fails or panics.
    pub fn backward(&self, loss: &Tensor) -> Result<GradStore> {
        backward(loss)
    }

    /// Computes `f(output, target)` after checking that both are on the output device; candle's losses would only
    /// report that two devices differ.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if the target is on another device; it says where the target is and how to move
    /// it.
    pub fn loss(
        &self,
        output: &Tensor,
        target: &Tensor,
        f: impl FnOnce(&Tensor, &Tensor) -> candle_core::Result<Tensor>,
    ) -> Result<Tensor> {
        if !target.device().same_device(&self.output_device) {
            return Err(wrong_target(target.device().location(), self.output_device.location()));
        }
        Ok(f(output, target)?)
    }

    /// Returns the first device's replica, which computes with the variables themselves. Use it to run on a single
    /// device.
    pub fn module(&self) -> &M {
        self.replicas[0].module()
    }

    /// Returns the replicas, one per device.
    pub fn replicas(&self) -> &[Replica<M>] {
        &self.replicas
    }

    /// Returns the device on which outputs are gathered and targets must be.
    pub fn output_device(&self) -> &Device {
        &self.output_device
    }

    /// Returns the variables that an optimizer trains, in the order in which the model requested them.
    pub fn parameters(&self) -> Vec<Var> {
        self.named_parameters().into_iter().map(|(_, var)| var).collect()
    }

    /// Returns the [`parameters`](Self::parameters) with the model's own names.
    pub fn named_parameters(&self) -> Vec<(String, Var)> {
        self.named_variables(false)
    }

    /// Returns the buffers with the model's own names, in the order in which the model requested them: the variables of integer dtype,
    /// and those whose names end in `running_mean`, `running_var` or `num_batches_tracked`.
    pub fn named_buffers(&self) -> Vec<(String, Var)> {
        self.named_variables(true)
    }

    fn named_variables(&self, buffers: bool) -> Vec<(String, Var)> {
        let variables = self.replicas[0].local_variables().variables.iter();
        let is_buffer = |name: &str, var: &Var| !var.dtype().is_float() || is_batch_norm_buffer(name);
        variables
            .filter(|variable| is_buffer(&variable.name, &variable.var) == buffers)
            .map(|variable| (variable.name.clone(), variable.var.clone()))
            .collect()
    }
}

impl<M: Sync> DataParallel<M> {
    /// Runs the model's forward pass on `xs`, whose dimension 0 is the batch.
    ///
    /// # Errors
    /// Returns [`Error::Replica`], which names the device, if a replica fails or panics. The model remains usable.
    pub fn forward(&self, xs: &Tensor) -> Result<Tensor>
    where
        M: Module,
    {
        self.one(xs, |module, xs| module.forward(xs))
    }

    /// Runs the model's forward pass on `xs`, whose dimension 0 is the batch, in training or evaluation mode.
    ///
    /// # Errors
    /// See [`forward`](Self::forward).
    pub fn forward_t(&self, xs: &Tensor, train: bool) -> Result<Tensor>
    where
        M: ModuleT,
    {
        self.one(xs, |module, xs| module.forward_t(xs, train))
    }

    fn one(&self, xs: &Tensor, f: impl Fn(&M, &Tensor) -> candle_core::Result<Tensor> + Sync) -> Result<Tensor> {
        let mut outputs = self.call(&[xs], |module, inputs| Ok(vec![f(module, &inputs[0])?]))?;
        Ok(outputs.remove(0))
    }

    /// Runs models with other signatures: `f` gets a replica and its part of each input, on its device, and returns any
    /// number of outputs, and each output is gathered.
    ///
    /// All inputs must have the same number of rows. Outputs are concatenated along dimension 0; scalars become a
    /// vector with one element per replica that had rows. Tensors that `f` uses besides its arguments are on one device
    /// only, so create constants on `inputs[0].device()`.
    ///
    /// ```
    /// # use candle_core::{Device, Module, Tensor};
    /// # use candle_nn::{Linear, VarMap, linear};
    /// # let (devices, varmap) = ([Device::Cpu, Device::Cpu], VarMap::new());
    /// # let dp = candle_ddp::data_parallel::DataParallel::new(&devices, &devices[0], &varmap, |vb| linear(4, 2, vb))?;
    /// # let x = Tensor::ones((3, 4), candle_core::DType::F32, &Device::Cpu)?;
    /// # let mask = Tensor::ones((3, 2), candle_core::DType::F32, &Device::Cpu)?;
    /// let outputs = dp.call(&[&x, &mask], |net: &Linear, inputs| {
    ///     let scores = net.forward(&inputs[0])?;
    ///     let masked = (&scores * &inputs[1])?;
    ///     Ok(vec![scores, masked])
    /// })?;
    /// assert_eq!(outputs[1].dims(), [3, 2]);
    /// # Ok::<(), candle_ddp::Error>(())
    /// ```
    ///
    /// # Errors
    /// See [`forward`](Self::forward). Also returns an error if the number, dtypes or shapes of outputs differ between
    /// replicas.
    pub fn call(
        &self,
        inputs: &[&Tensor],
        f: impl Fn(&M, &[Tensor]) -> candle_core::Result<Vec<Tensor>> + Sync,
    ) -> Result<Vec<Tensor>> {
        let devices: Vec<Device> = self.replicas.iter().map(|replica| replica.device().clone()).collect();
        let mut inputs = graph::Inputs::cut(inputs, &devices)?;
        let outputs = parallel_apply(&self.replicas, inputs.parts(), |module, part| f(module, &part))?;
        let locals =
            self.replicas.iter().take(outputs.len()).map(|replica| replica.local_variables().clone()).collect();
        graph::join(locals, inputs, outputs, &self.root)
    }
}

/// Allows `xs.apply_t(&dp, train)` and every function that takes a module. candle implements `ModuleT` for every
/// `Module`, so a wrapper can implement only one of the two.
impl<M: ModuleT + Sync> ModuleT for DataParallel<M> {
    fn forward_t(&self, xs: &Tensor, train: bool) -> candle_core::Result<Tensor> {
        Ok(self.one(xs, |module, xs| module.forward_t(xs, train))?)
    }
}

/// All [`named_parameters`](DataParallel::named_parameters).
impl<M> From<&DataParallel<M>> for Parameters {
    fn from(model: &DataParallel<M>) -> Self {
        model.named_parameters().into()
    }
}

debug_fields!(<M> DataParallel<M>: |this| devices = this.replicas.iter().map(Replica::device).collect::<Vec<_>>(),
    output_device = this.output_device, parameters = this.parameters().len(), buffers = this.named_buffers().len());

fn wrong_target(found: DeviceLocation, output_device: DeviceLocation) -> Error {
    use device::device_name;
    let (found, output_device) = (device_name(found), device_name(output_device));
    let reason = format!(
        "it is on device {found}, but DataParallel gathers its outputs on device {output_device}: move it with \
         target.to_device(dp.output_device())?, or construct DataParallel with {found} as its output_device"
    );
    Error::invalid("target", reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_on_another_device_is_refused_with_advice() {
        let error = wrong_target(DeviceLocation::Cpu, DeviceLocation::Cuda { gpu_id: 1 }).to_string();
        assert!(error.contains("on device cpu") && error.contains("outputs on device cuda:1"), "{error}");
        assert!(error.contains("to_device(dp.output_device())"), "{error}");
    }
}
