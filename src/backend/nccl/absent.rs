//! The GPU engine in a build without it: everything returns an error that says how to get it.
use super::{Collective, Communicator, Work};
use crate::rendezvous::Store;
use crate::{Error, Result};
use candle_core::Device;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

fn absent() -> Error {
    Error::Unavailable {
        what: "Backend::Nccl".to_string(),
        hint: "candle-ddp was built without the feature `nccl`: add it in Cargo.toml \
               (candle-ddp = { features = [\"nccl\"] }), or build with `--features nccl`"
            .to_string(),
    }
}

/// The version of the NCCL library in use.
pub fn version() -> Result<i32> {
    Err(absent())
}

/// How many GPUs this process sees.
pub fn device_count() -> Result<usize> {
    Err(absent())
}

/// The device of a rank.
#[allow(unused_variables)]
pub(crate) fn choose_device(explicit: Option<Device>, local_rank: usize) -> Result<Device> {
    Err(absent())
}

/// How an [`NcclCommunicator`] works. The options must be the same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NcclOptions {
    /// How long the construction, and later each call, may take before the group fails.
    pub timeout: Duration,
    /// A rank that sends no heartbeat for this long is taken for dead, which ends the group.
    pub lost_after: Duration,
}

impl Default for NcclOptions {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(600), lost_after: Duration::from_secs(10) }
    }
}

/// One rank of a group whose tensors are on GPUs. There is none in this build.
pub struct NcclCommunicator(Infallible);

impl NcclCommunicator {
    /// Always an error, which names the feature.
    #[allow(unused_variables)]
    pub fn new(
        store: Arc<dyn Store>,
        rank: usize,
        world_size: usize,
        device: &Device,
        options: NcclOptions,
    ) -> Result<Self> {
        Err(absent())
    }
}

impl Communicator for NcclCommunicator {
    fn rank(&self) -> usize {
        match self.0 {}
    }

    fn world_size(&self) -> usize {
        match self.0 {}
    }

    fn start(&self, _: Collective) -> Result<Work> {
        match self.0 {}
    }

    fn abort(&self, _: &str) {
        match self.0 {}
    }
}
