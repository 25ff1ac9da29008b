//! DataParallel: one process trains a model on several devices, each of which takes a part of every batch.
//!
//! [`DistributedDataParallel`](crate::DistributedDataParallel) with one process for each device is faster, as it is in
//! PyTorch: gradients are averaged while backward goes on, and no device has more to do than the others. `DataParallel`
//! is for programs that are one process and should stay one.
//!
//! Its parts are public, as PyTorch's are: [`replicate`], [`scatter`], [`parallel_apply`], [`gather`].
mod apply;
mod device;
mod graph;
mod replica;
mod scatter_gather;

pub use apply::parallel_apply;
pub use graph::backward;
pub use replica::{Replica, replicate};
pub use scatter_gather::{gather, scatter};

use crate::tensor::variables::{NamePredicate, is_batch_norm_buffer};
use crate::{Error, Result};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, DeviceLocation, Module, ModuleT, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use std::fmt;
use std::sync::Arc;

/// How DataParallel works.
#[derive(Clone)]
pub struct DataParallelOptions {
    /// Of what dtype the model's variables are made that are not in the `VarMap` yet. Default: f32.
    pub dtype: DType,
    /// Which variables are buffers, and so no [`parameters`](DataParallel::parameters), beside those of integer type
    /// and those whose names end in `running_mean`, `running_var` or `num_batches_tracked`. Default: none.
    pub is_buffer: NamePredicate,
}

impl Default for DataParallelOptions {
    fn default() -> Self {
        Self { dtype: DType::F32, is_buffer: Arc::new(|_| false) }
    }
}

impl fmt::Debug for DataParallelOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DataParallelOptions").field("dtype", &self.dtype).finish_non_exhaustive()
    }
}

/// A model that splits each batch over several devices: PyTorch's `DataParallel`.
///
/// The variables live in a `VarMap`, with the model's own names, on the first device. The model is built once for each
/// device; on the first it computes with the variables themselves, on the others with copies, which are brought up to
/// date at the beginning of every forward pass, before any replica computes. A forward pass scatters its inputs over the
/// devices, runs all replicas at the same time, each on a thread of its own, and gathers their outputs on the output
/// device. A batch with fewer rows than there are devices uses the first of them only.
///
/// Gradients come from [`backward`](Self::backward), which runs the replicas' backward passes at the same time as well,
/// and sums their gradients up on the first device. With a loss that is the mean over the batch they are those that the
/// model on one device would get; `loss.backward()` is an error.
///
/// Buffers that a forward pass changes (the running means of batch norms) keep what the first device's replica wrote: the
/// others' changes are lost, as in PyTorch. Batch norms see the rows of their device only.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_ddp::DataParallel;
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
/// A model is used by several threads, and so must be `Sync`, as candle's layers are. `candle_nn::Sequential` is not: keep
/// the layers in a struct, or in a `Vec`.
///
/// What the model may not do: compute something from a parameter while it is constructed and keep the result (it would
/// not follow the parameter), or ask for variables later on. A GPU may be in the list of devices only once; the CPU may
/// stand there several times.
pub struct DataParallel<M> {
    replicas: Vec<Replica<M>>,
    output_device: Device,
    is_buffer: NamePredicate,
    /// A variable that every output depends on, so that candle's backward pass comes to the replicas.
    root: Var,
}

impl<M> DataParallel<M> {
    /// Builds the model on each of `devices` with f32 variables in `varmap` (those that are not there are made), on the
    /// first of them. Outputs are gathered on `output_device`; PyTorch's default is the first device.
    ///
    /// # Errors
    /// A variable that is on another than the first device ([`Error::ParameterDevice`]), a list of devices that is empty,
    /// has a GPU twice, or has several that were not made by `Device::new_cuda_with_stream`, and what `build` returns.
    pub fn new<E>(
        devices: &[Device],
        output_device: &Device,
        varmap: &VarMap,
        build: impl Fn(VarBuilder<'static>) -> std::result::Result<M, E>,
    ) -> Result<Self>
    where
        Error: From<E>,
    {
        Self::with_options(devices, output_device, varmap, build, DataParallelOptions::default())
    }

    /// [`new`](Self::new) with options of one's own.
    ///
    /// # Errors
    /// As with [`new`](Self::new).
    pub fn with_options<E>(
        devices: &[Device],
        output_device: &Device,
        varmap: &VarMap,
        build: impl Fn(VarBuilder<'static>) -> std::result::Result<M, E>,
        options: DataParallelOptions,
    ) -> Result<Self>
    where
        Error: From<E>,
    {
        let replicas = replicate(devices, varmap, options.dtype, build)?;
        let root = Var::zeros((), DType::F32, output_device)?;
        Ok(Self { replicas, output_device: output_device.clone(), is_buffer: options.is_buffer, root })
    }

    /// Backward through everything that `loss` depends on: this model's outputs, those of other `DataParallel` models,
    /// and ordinary variables. The same as [`backward`], which says more.
    ///
    /// # Errors
    /// A replica's error or panic, by the name of its device ([`Error::Replica`]).
    pub fn backward(&self, loss: &Tensor) -> Result<GradStore> {
        backward(loss)
    }

    /// `f(output, target)`, having made sure that both are on the output device, where a loss of candle's would only say
    /// that two devices differ.
    ///
    /// # Errors
    /// [`Error::TargetDevice`] says where the target is, where it should be, and how it gets there.
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

    /// The first device's replica, which computes with the variables themselves: plain candle, for what should run on
    /// one device.
    pub fn module(&self) -> &M {
        self.replicas[0].module()
    }

    /// The replicas, one for each device.
    pub fn replicas(&self) -> &[Replica<M>] {
        &self.replicas
    }

    /// Where outputs are gathered, and targets have to be.
    pub fn output_device(&self) -> &Device {
        &self.output_device
    }

    /// The variables that an optimizer trains, in the order in which the model asked for them.
    pub fn parameters(&self) -> Vec<Var> {
        self.named_parameters().into_iter().map(|(_, var)| var).collect()
    }

    /// [`parameters`](Self::parameters) with the model's own names for them.
    pub fn named_parameters(&self) -> Vec<(String, Var)> {
        self.named_variables(false)
    }

    /// The buffers with the model's own names for them, in the order in which the model asked for them.
    pub fn named_buffers(&self) -> Vec<(String, Var)> {
        self.named_variables(true)
    }

    fn named_variables(&self, buffers: bool) -> Vec<(String, Var)> {
        let variables = self.replicas[0].place().variables.iter();
        let is_buffer =
            |name: &str, var: &Var| !var.dtype().is_float() || is_batch_norm_buffer(name) || (self.is_buffer)(name);
        variables
            .filter(|variable| is_buffer(&variable.name, &variable.var) == buffers)
            .map(|variable| (variable.name.clone(), variable.var.clone()))
            .collect()
    }
}

impl<M: Sync> DataParallel<M> {
    /// The model's forward pass on `xs`, whose dimension 0 is that of the batch.
    ///
    /// # Errors
    /// A replica's error or panic, by the name of its device ([`Error::Replica`]); the next call works again.
    pub fn forward(&self, xs: &Tensor) -> Result<Tensor>
    where
        M: Module,
    {
        self.one(xs, |module, xs| module.forward(xs))
    }

    /// The model's forward pass on `xs`, whose dimension 0 is that of the batch, in training or in evaluation mode.
    ///
    /// # Errors
    /// As with [`forward`](Self::forward).
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

    /// Models with other signatures: `f` gets a replica and its part of each of the inputs, on its device, and returns
    /// any number of outputs, which are gathered one by one.
    ///
    /// All inputs have the same number of rows. Outputs are put one below the other in dimension 0; those without
    /// dimensions become a list, one element for each replica that had something to do. What `f` uses besides its
    /// arguments is on one device: make constants on `inputs[0].device()`.
    ///
    /// ```
    /// # use candle_core::{Device, Module, Tensor};
    /// # use candle_nn::{Linear, VarMap, linear};
    /// # let (devices, varmap) = ([Device::Cpu, Device::Cpu], VarMap::new());
    /// # let dp = candle_ddp::DataParallel::new(&devices, &devices[0], &varmap, |vb| linear(4, 2, vb))?;
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
    /// As with [`forward`](Self::forward), and outputs whose number, dtypes or shapes differ between replicas.
    pub fn call(
        &self,
        inputs: &[&Tensor],
        f: impl Fn(&M, &[Tensor]) -> candle_core::Result<Vec<Tensor>> + Sync,
    ) -> Result<Vec<Tensor>> {
        let devices: Vec<Device> = self.replicas.iter().map(|replica| replica.device().clone()).collect();
        let mut inputs = graph::Inputs::cut(inputs, &devices)?;
        let outputs = parallel_apply(&self.replicas, inputs.parts(), |module, part| f(module, &part))?;
        let places = self.replicas.iter().take(outputs.len()).map(|replica| replica.place().clone()).collect();
        graph::join(places, inputs, outputs, &self.root)
    }
}

/// `xs.apply_t(&dp, train)`, and every function that takes a module. (candle makes every `Module` a `ModuleT`, so that a
/// wrapper can only be one of the two.)
impl<M: ModuleT + Sync> ModuleT for DataParallel<M> {
    fn forward_t(&self, xs: &Tensor, train: bool) -> candle_core::Result<Tensor> {
        Ok(self.one(xs, |module, xs| module.forward_t(xs, train))?)
    }
}

fn wrong_target(found: DeviceLocation, output_device: DeviceLocation) -> Error {
    use device::device_name;
    Error::TargetDevice { found: device_name(found), output_device: device_name(output_device) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_elsewhere_is_told_where_to_go() {
        let error = wrong_target(DeviceLocation::Cpu, DeviceLocation::Cuda { gpu_id: 1 }).to_string();
        assert!(error.contains("on device cpu") && error.contains("outputs on device cuda:1"), "{error}");
        assert!(error.contains("to_device(dp.output_device())"), "{error}");
    }
}
