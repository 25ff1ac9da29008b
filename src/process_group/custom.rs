//! Groups over engines from outside of this crate.
use super::ProcessGroup;
use super::engine::{Backend, Settings};
use crate::backend::Communicator;
use crate::rendezvous::Store;
use crate::{Error, Result};
use candle_core::Device;
use std::sync::Arc;
use std::time::Duration;

/// What [`ProcessGroup::with_communicator`] needs to know besides the engine.
#[derive(Clone, Debug)]
pub struct CustomOptions {
    /// The device of the tensors that the engine takes. Default: the CPU.
    pub device: Device,
    /// How long a collective may take, as [`ProcessGroup::timeout`] tells it. Whether that is kept is up to the engine.
    /// Default: 10 minutes.
    pub timeout: Duration,
    /// This process's place among those of the job on the same host. Default: 0.
    pub local_rank: usize,
    /// How many processes of the job run on this host. Default: 1.
    pub local_world_size: usize,
}

impl Default for CustomOptions {
    fn default() -> Self {
        Self { device: Device::Cpu, timeout: Duration::from_secs(600), local_rank: 0, local_world_size: 1 }
    }
}

impl ProcessGroup {
    /// A group over an engine from outside of this crate, such as MPI or UCX: this rank's `communicator`, and a `store`
    /// that the ranks of the group share and nothing else uses. [`rendezvous`](crate::rendezvous::rendezvous) gives one, and
    /// tells which rank this process is.
    ///
    /// Everything in this crate works over such a group. [`new_group`](Self::new_group) needs an engine that implements
    /// [`Communicator::split`]. Layers that communicate in their forward pass, such as `SyncBatchNorm`, need that method or
    /// [`Communicator::duplicate`].
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where `local_rank` is not below `local_world_size`.
    pub fn with_communicator(
        store: Arc<dyn Store>,
        communicator: Box<dyn Communicator>,
        options: CustomOptions,
    ) -> Result<Self> {
        let CustomOptions { device, timeout, local_rank, local_world_size } = options;
        if local_rank >= local_world_size {
            let reason = format!("it must be below local_world_size ({local_world_size}), and is {local_rank}");
            return Err(Error::invalid("local_rank", reason));
        }
        let backend = Backend::Custom;
        let settings = Settings { backend, device, timeout, local_rank, local_world_size, address: None };
        let global_ranks = (0..communicator.world_size()).collect();
        Ok(Self::around(communicator, store, global_ranks, settings))
    }
}
