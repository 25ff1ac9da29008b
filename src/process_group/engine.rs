//! Selection and creation of a group's engine.
use crate::backend::single::SingleCommunicator;
use crate::backend::{Communicator, Construction, cpu, nccl};
use crate::rendezvous::{PrefixStore, Secret, Store};
use crate::{Error, Result};
use candle_core::Device;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

/// The engine that moves tensors between ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Backend {
    /// NCCL if it is compiled in and there is a GPU, otherwise the CPU engine. If `InitOptions.device` is a GPU and
    /// NCCL is not compiled in: `Single`.
    #[default]
    Auto,
    /// This crate's engine for tensors in host memory.
    Cpu,
    /// NVIDIA's NCCL, for tensors on GPUs (feature `nccl`).
    Nccl,
    /// No engine: a world of one rank on any device, including a GPU without NCCL (feature `cuda`).
    Single,
    /// An engine outside this crate: see [`ProcessGroup::with_communicator`](super::ProcessGroup::with_communicator).
    Custom,
}

/// Settings that all groups of a job share.
#[derive(Clone)]
pub(super) struct Settings {
    pub(super) backend: Backend,
    pub(super) device: Device,
    pub(super) timeout: Duration,
    pub(super) nccl: nccl::NcclOptions,
    pub(super) local_rank: usize,
    pub(super) local_world_size: usize,
    pub(super) address: Option<IpAddr>,
    pub(super) secret: Option<Secret>,
    pub(super) virtual_ranks: Option<usize>,
}

/// The part of a group's store that its engine uses.
pub(super) fn engine_store(store: &Arc<dyn Store>, settings: &Settings) -> Arc<dyn Store> {
    let prefix = match settings.backend {
        Backend::Nccl => "nccl",
        Backend::Single => "single",
        Backend::Custom => "custom",
        Backend::Auto | Backend::Cpu => "cpu",
    };
    Arc::new(PrefixStore::new(prefix, Arc::clone(store)))
}

/// Creates the engine of a group.
pub(super) fn communicator(
    construction: Construction,
    store: Arc<dyn Store>,
    rank: usize,
    world_size: usize,
    settings: &Settings,
) -> Result<Box<dyn Communicator>> {
    let (store, timeout) = (engine_store(&store, settings), settings.timeout);
    if settings.backend == Backend::Custom {
        return Err(Error::Unavailable {
            what: "another group over an external engine".to_string(),
            hint: "the engine does not support it: implement Communicator::split".to_string(),
        });
    }
    if settings.backend == Backend::Single {
        if world_size > 1 {
            let device = settings.device.location();
            return Err(Error::Unavailable {
                what: format!("a process group of {world_size} ranks on {device:?} with Backend::Single"),
                hint:
                    "it is for a world of one rank: build with the feature `nccl` for ranks on GPUs, or give no device \
                       and the CPU engine connects the ranks"
                        .to_string(),
            });
        }
        return Ok(Box::new(SingleCommunicator::new(settings.device.clone())));
    }
    if settings.backend == Backend::Nccl {
        let options = nccl::NcclOptions { timeout, ..settings.nccl.clone() };
        let (recording, device) = (construction.recording.cloned(), &settings.device);
        return Ok(Box::new(nccl::NcclCommunicator::within(recording, store, rank, world_size, device, options)?));
    }
    let options =
        cpu::CpuOptions { timeout, address: settings.address, secret: settings.secret.clone(), ..Default::default() };
    Ok(Box::new(cpu::CpuCommunicator::within(construction, store, rank, world_size, options)?))
}
