//! The NCCL engine in a build without it: every call returns an error that says how to get it.
mod options;

use super::{Collective, Communicator, Work};
use crate::flight_recorder::Recording;
use crate::rendezvous::Store;
use crate::{Error, Result};
use candle_core::Device;
use std::convert::Infallible;
use std::sync::Arc;

pub use options::NcclOptions;

fn absent() -> Error {
    Error::Unavailable {
        what: "Backend::Nccl".to_string(),
        hint: "candle-ddp was built without the feature `nccl`: add it in Cargo.toml \
               (candle-ddp = { features = [\"nccl\"] }), or build with `--features nccl`"
            .to_string(),
    }
}

/// Returns the version of the NCCL library in use.
///
/// # Errors
/// Always returns [`Error::Unavailable`], which names the feature.
pub fn version() -> Result<i32> {
    Err(absent())
}

/// Returns the number of GPUs that this process sees.
///
/// # Errors
/// Always returns [`Error::Unavailable`], which names the feature.
pub fn device_count() -> Result<usize> {
    Err(absent())
}

/// Returns the device of a rank.
#[allow(unused_variables)]
pub(crate) fn choose_device(explicit: Option<Device>, local_rank: usize) -> Result<Device> {
    Err(absent())
}

/// One rank of a group whose tensors are on GPUs. This build never creates one.
#[derive(Debug)]
pub struct NcclCommunicator(Infallible);

impl NcclCommunicator {
    /// Always returns an error that names the feature.
    ///
    /// # Errors
    /// Always returns [`Error::Unavailable`].
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

    /// Like `new`.
    #[allow(unused_variables)]
    pub(crate) fn within(
        recording: Option<Recording>,
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
