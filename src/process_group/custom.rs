//! Groups over external engines.
use super::ProcessGroup;
use super::engine::{Backend, Settings};
use super::job::Job;
use super::place::Place;
use crate::backend::Communicator;
use crate::rendezvous::Store;
use crate::virtual_ranks::VirtualRanks;
use crate::{Error, Result};
use candle_core::Device;
use std::sync::Arc;
use std::time::Duration;

/// Options of [`ProcessGroup::with_communicator`].
#[derive(Clone, Debug)]
pub struct CustomOptions {
    /// The device of the tensors that the engine takes. Default: the CPU.
    pub device: Device,
    /// How long a collective may take, as [`ProcessGroup::timeout`] returns it. Enforcing it is up to the engine.
    /// Default: 10 minutes.
    pub timeout: Duration,
    /// This process's rank on its host. Default: 0.
    pub local_rank: usize,
    /// The number of processes of the job on this host. Default: 1.
    pub local_world_size: usize,
    /// See [`InitOptions::virtual_ranks`](crate::InitOptions::virtual_ranks). Default: None.
    pub virtual_ranks: Option<usize>,
}

impl Default for CustomOptions {
    fn default() -> Self {
        let timeout = Duration::from_secs(600);
        Self { device: Device::Cpu, timeout, local_rank: 0, local_world_size: 1, virtual_ranks: None }
    }
}

impl ProcessGroup {
    /// Creates a group over an engine outside this crate, such as MPI or UCX, from this rank's `communicator` and a
    /// `store` that the ranks of the group share and nothing else uses, such as a
    /// [`TcpStore`](crate::rendezvous::TcpStore). Under a launcher, the function `rendezvous` of the crate
    /// [candle-ddp-rendezvous](https://docs.rs/candle-ddp-rendezvous) gives a store and this process's rank.
    ///
    /// Most of this crate works over such a group. [`new_group`](Self::new_group) requires an engine that
    /// implements [`Communicator::split`]. Layers that communicate in their forward pass, such as `SyncBatchNorm`,
    /// require that method or [`Communicator::duplicate`]. The flight recorder does not see its calls.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if `local_rank` is not below `local_world_size`, or for a wrong number of virtual ranks.
    pub fn with_communicator(
        store: Arc<dyn Store>,
        communicator: Box<dyn Communicator>,
        options: CustomOptions,
    ) -> Result<Self> {
        let CustomOptions { device, timeout, local_rank, local_world_size, virtual_ranks } = options;
        if local_rank >= local_world_size {
            let reason = format!("it must be below local_world_size ({local_world_size}), but is {local_rank}");
            return Err(Error::invalid("local_rank", reason));
        }
        let backend = Backend::Custom;
        let (address, secret, nccl) = (None, None, Default::default());
        let settings =
            Settings { backend, device, timeout, nccl, local_rank, local_world_size, address, secret, virtual_ranks };
        let (rank, world_size) = (communicator.rank(), communicator.world_size());
        VirtualRanks::check(virtual_ranks, world_size)?;
        let place = Place::of_all(Job::without_launcher(world_size), rank, world_size);
        Self::around(communicator, store, place, settings, None)
    }
}
