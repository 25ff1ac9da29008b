//! The memory of training, apart from activations.
use crate::Result;
use crate::ddp::DistributedDataParallel;
use crate::ddp::model::parameter::{Buffer, Frozen};
use crate::state::StateDict;
use candle_core::{DeviceLocation, Tensor};
use std::fmt;

/// The memory of training on this rank, in bytes: [`DistributedDataParallel::memory_estimate`]. It is shown as a table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryEstimate {
    /// One for each device with variables.
    pub devices: Vec<DeviceMemory>,
}

/// The memory of training on one device, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceMemory {
    /// The device.
    pub device: DeviceLocation,
    /// All variables, or this rank's pieces.
    pub parameters: usize,
    /// The copies of parameters with which the model computes, in its dtype; of a [sharded](crate::Sharding) model those outside of blocks,
    /// and of two blocks.
    pub replicas: usize,
    /// Gradients that are not views of buckets: shards under ZeRO, and results whose dtype differs from their bucket's.
    pub gradients: usize,
    /// The optimizer's state on this rank.
    pub optimizer: usize,
    /// The buckets; under ZeRO, the two that are in memory at once.
    pub buckets: usize,
}

impl DeviceMemory {
    /// The sum.
    pub fn total(&self) -> usize {
        self.parameters + self.replicas + self.gradients + self.optimizer + self.buckets
    }
}

impl MemoryEstimate {
    fn on(&mut self, device: DeviceLocation) -> &mut DeviceMemory {
        let known = self.devices.iter().position(|memory| memory.device == device);
        let index = known.unwrap_or(self.devices.len());
        if known.is_none() {
            let (parameters, replicas, gradients, optimizer, buckets) = (0, 0, 0, 0, 0);
            self.devices.push(DeviceMemory { device, parameters, replicas, gradients, optimizer, buckets });
        }
        &mut self.devices[index]
    }
}

/// A row for each device, in MiB.
impl fmt::Display for MemoryEstimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let heads = ["parameters", "replicas", "gradients", "optimizer", "buckets", "total"];
        write!(f, "{:<16}", "MiB on this rank")?;
        heads.iter().try_for_each(|head| write!(f, "{head:>12}"))?;
        for memory in &self.devices {
            let DeviceMemory { parameters, replicas, gradients, optimizer, buckets, .. } = *memory;
            let device = match memory.device {
                DeviceLocation::Cpu => "CPU".to_string(),
                DeviceLocation::Cuda { gpu_id } => format!("GPU {gpu_id}"),
                other => format!("{other:?}"),
            };
            write!(f, "\n{device:<16}")?;
            for bytes in [parameters, replicas, gradients, optimizer, buckets, memory.total()] {
                write!(f, "{:>12.1}", bytes as f64 / f64::from(1 << 20))?;
            }
        }
        Ok(())
    }
}

impl<M> DistributedDataParallel<M> {
    /// The memory that training with `optimizer` takes on this rank, apart from activations, which depend on the batch, and what
    /// layers and engines keep. Call it before the first step, for example on rank 0: it does not communicate.
    ///
    /// ```
    /// # use candle_ddp::DistributedDataParallel;
    /// # use candle_ddp::optim::{AdamW, ParamsAdamW};
    /// # use candle_nn::{VarMap, linear};
    /// # fn main() -> candle_ddp::Result<()> {
    /// # candle_ddp::spawn(2, |pg| {
    /// let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), |vb| linear(512, 512, vb))?;
    /// let optimizer = AdamW::new(&ddp, ParamsAdamW::default())?;
    /// let estimate = ddp.memory_estimate(&optimizer)?;
    /// println!("{estimate}");
    /// // Two numbers for each parameter.
    /// assert_eq!(estimate.devices[0].optimizer / (2 * estimate.devices[0].parameters), 1);
    /// # Ok(())
    /// # })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// It counts no gradients of an earlier pass that the program holds during the next one, nothing that a communication hook keeps, and no
    /// frozen weights that are no variables, such as those that adapters are for, apart from two blocks under sharding.
    ///
    /// # Errors
    /// Returns the errors of the optimizer's [`state_dict`](StateDict::state_dict), such as for parameters without names.
    pub fn memory_estimate(&self, optimizer: &(impl StateDict + ?Sized)) -> Result<MemoryEstimate> {
        let mut all = MemoryEstimate::default();
        let variables = &self.core.variables;
        let of = |tensor: &Tensor| (tensor.device().location(), tensor.elem_count() * tensor.dtype().size_in_bytes());
        let buffers = variables.buffers.iter().chain(&variables.ignored).map(|Buffer { var, .. }| var);
        for var in variables.without_buffers().map(|(_, var)| var).chain(buffers) {
            let (device, bytes) = of(var);
            all.on(device).parameters += bytes;
        }
        let converted = variables.frozen.iter().filter_map(|Frozen { converted, .. }| converted.as_ref());
        if let Some(blocks) = &self.core.blocks {
            all.on(self.core.group().device().location()).replicas += blocks.units.bytes();
        } else {
            for replica in variables.parameters.iter().filter_map(|parameter| parameter.replica()).chain(converted) {
                let (device, bytes) = of(replica);
                all.on(device).replicas += bytes;
            }
        }
        for tensor in optimizer.share()?.all().values().filter(|tensor| tensor.dtype().is_float()) {
            let (device, bytes) = of(tensor);
            all.on(device).optimizer += bytes;
        }
        let gathered = |parameter: usize| variables.parameters[parameter].var.dtype();
        for (device, gradients, buckets) in self.core.reducer.memory(gathered) {
            let memory = all.on(device);
            memory.gradients += gradients;
            memory.buckets += buckets;
        }
        Ok(all)
    }
}
