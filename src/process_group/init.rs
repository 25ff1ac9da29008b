use super::{ProcessGroup, Settings};
use crate::backend::{Communicator, cpu};
use crate::rendezvous::{self, PrefixStore, RendezvousOptions, Store};
use crate::{Error, Result};
use candle_core::Device;
use std::sync::Arc;
use std::time::Duration;

/// The engine that moves tensors between ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Backend {
    /// NCCL when it is compiled in and a GPU is there, the CPU engine otherwise.
    #[default]
    Auto,
    /// The crate's own engine for tensors in host memory.
    Cpu,
    /// NVIDIA's NCCL, for tensors on GPUs (feature `nccl`).
    Nccl,
    /// MPI, for tensors in host memory.
    Mpi,
}

/// What [`init_process_group`] needs to know; the default takes everything from the environment that `ddprun`,
/// torchrun, Slurm, Open MPI or MPICH set.
#[derive(Clone, Debug)]
pub struct InitOptions {
    /// The engine. Default: `Auto`.
    pub backend: Backend,
    /// How ranks find each other: `env://` (default), `tcp://host:port` or `file:///path`.
    pub init_method: String,
    /// This process's rank, when the environment does not say or says otherwise.
    pub rank: Option<usize>,
    /// The number of ranks, when the environment does not say or says otherwise.
    pub world_size: Option<usize>,
    /// How long to wait for the other ranks to come, and how long a collective may take. Default: 10 minutes.
    pub timeout: Duration,
    /// The device of this rank's tensors. Default: chosen by the engine.
    pub device: Option<Device>,
}

impl Default for InitOptions {
    fn default() -> Self {
        Self {
            backend: Backend::Auto,
            init_method: "env://".to_string(),
            rank: None,
            world_size: None,
            timeout: Duration::from_secs(600),
            device: None,
        }
    }
}

/// Joins this process to the others of its job and builds the engine that connects them: PyTorch's
/// `torch.distributed.init_process_group`. Every rank calls it; it returns when all have come.
///
/// # Errors
/// A missing or contradictory environment, an engine that is not there, a rendezvous that nobody else comes to within
/// the time-out: each says which variable, address or rank, and what to do.
pub fn init_process_group(options: InitOptions) -> Result<ProcessGroup> {
    let (backend, device) = choose(options.backend, options.device)?;
    let found = rendezvous::rendezvous(&RendezvousOptions {
        init_method: options.init_method,
        rank: options.rank,
        world_size: options.world_size,
        timeout: options.timeout,
    })?;
    log::info!("rank {} of {}: backend {backend:?}, device {device:?}", found.rank, found.world_size);
    let settings = Settings {
        backend,
        device,
        timeout: options.timeout,
        local_rank: found.local_rank,
        local_world_size: found.local_world_size,
        address: found.address,
    };
    ProcessGroup::connect(found.store, (0..found.world_size).collect(), found.rank, settings)
}

/// The engine and the device that `Auto` and `None` stand for.
fn choose(backend: Backend, device: Option<Device>) -> Result<(Backend, Device)> {
    let unavailable = |what: &str, hint: &str| Error::Unavailable { what: what.to_string(), hint: hint.to_string() };
    match backend {
        Backend::Auto | Backend::Cpu => {
            let device = device.unwrap_or(Device::Cpu);
            if !device.is_cpu() {
                return Err(unavailable(
                    "a process group for tensors on a GPU",
                    "the CPU engine moves tensors in host memory only, so give InitOptions.device = None",
                ));
            }
            Ok((Backend::Cpu, device))
        }
        Backend::Nccl if cfg!(feature = "nccl") => {
            Err(unavailable("Backend::Nccl", "this version of candle-ddp has no NCCL engine yet"))
        }
        Backend::Nccl => Err(unavailable(
            "Backend::Nccl",
            "candle-ddp was built without the feature `nccl`: add it in Cargo.toml \
             (candle-ddp = { features = [\"nccl\"] }), or build with `--features nccl`",
        )),
        Backend::Mpi => Err(unavailable(
            "Backend::Mpi",
            "this version of candle-ddp has no MPI engine: use Backend::Cpu, which needs no service to be started",
        )),
    }
}

/// The engine of one group.
pub(super) fn communicator(
    store: Arc<dyn Store>,
    rank: usize,
    world_size: usize,
    settings: &Settings,
) -> Result<Box<dyn Communicator>> {
    let options = cpu::CpuOptions { timeout: settings.timeout, address: settings.address, ..Default::default() };
    let store = Arc::new(PrefixStore::new("cpu", store));
    Ok(Box::new(cpu::CpuCommunicator::new(store, rank, world_size, options)?))
}
