//! The beginning of a rank, before it has a communicator: it opens its GPU, connects to the other ranks, and starts the threads of its group.
use super::comm::{self, BLOCKING, Comm, OLDEST_VERSION, UniqueId, WaitError, blocking};
use super::comm_streams::{CommStreams, abort_timeout};
use super::device::{check_queues, reserve};
use super::identity::{self, Identity};
use super::limit::{Ctas, Limit, check_order};
use super::links;
use super::status::{NcclFailure, Version, version};
use super::stream::Streams;
use super::threads::{join, spawn};
use super::wait::{PATIENCE, cancellation_check};
use super::{NcclOptions, cuda_failure};
use crate::error::Failure;
use crate::rendezvous::{self, Store, discard, host_identity};
use crate::warnings::warn_aloud;
use crate::{Error, Result};
use candle_core::Device;
use candle_ddp_engine::device_group::{self, DeviceGroup, HealthStore, HeartbeatMonitor, SuspectedFailure};
use candle_ddp_env::PROCESS;
use std::sync::{Arc, Once};
use std::thread::JoinHandle;
use std::time::Duration;

/// The key of NCCL's id; its value is empty if rank 0 could not create one.
const ID: &str = "id";

/// Opens the device and determines this rank's identity.
pub(super) fn open(device: &Device, rank: usize, options: &NcclOptions, limit: Limit) -> Result<(Streams, Identity)> {
    let nccl_version = version()?;
    if nccl_version < OLDEST_VERSION {
        return Err(Error::Unavailable {
            what: format!("NCCL {}", Version(nccl_version)),
            hint: format!("{} or later is needed: install a newer libnccl.so.2", Version(OLDEST_VERSION)),
        });
    }
    if rank == 0 {
        warn_of_old(nccl_version);
    }
    if PROCESS.raw(BLOCKING).is_some_and(|value| is_one(&value)) {
        return Err(blocking().into_error(rank));
    }
    abort_timeout()?;
    reserve()?;
    comm::check(options)?;
    if limit.is_companion() {
        check_queues()?;
    }
    let driver = |error| cuda_failure(error).into_error(rank);
    let streams = Streams::new(device.as_cuda_device()?, options.high_priority).map_err(driver)?;
    check_order(streams.device())?;
    let multiprocessors = streams.multiprocessors().map_err(driver)?;
    let pci_bus_id = streams.pci_bus_id().map_err(driver)?;
    let (gpu, uuid) = streams.name_and_uuid().unwrap_or_else(|error| {
        log::debug!("the driver does not name the GPU: {}", super::cuda_error(error));
        Default::default()
    });
    // A companion has the links of its group.
    let tests_links = limit == Limit::Main && PROCESS.switch(links::VARIABLE)? != Some(false);
    let (host, process) = (host_identity(), identity::process()?);
    Ok((streams, Identity { nccl_version, host, pci_bus_id, process, gpu, uuid, tests_links, multiprocessors }))
}

/// Whether NCCL, which reads numbers as C does, reads 1.
fn is_one(value: &str) -> bool {
    let number = value.trim().trim_start_matches('+');
    let hexadecimal = number.strip_prefix("0x").or_else(|| number.strip_prefix("0X"));
    hexadecimal.map_or(number.parse(), |digits| i64::from_str_radix(digits, 16)) == Ok(1)
}

/// Warns once of versions of NCCL that have known errors.
fn warn_of_old(version: i32) {
    /// The first version that keeps the state of a call in progress in memory that is not one thread's.
    const SOUND: i32 = 22_703;
    static SAID: Once = Once::new();
    if version < SOUND {
        let known = if version == 22_501 { ": in this one, ending a group after a failure hangs" } else { "" };
        let (version, sound) = (Version(version), Version(SOUND));
        SAID.call_once(|| warn_aloud(format_args!("NCCL {version}: {sound} or later is recommended{known}")));
    }
}

/// The reason why ranks that have met do not come into NCCL.
fn absence(id: &UniqueId) -> String {
    let address = id.address().map_or(String::new(), |address| {
        format!(" at {address}, the address that NCCL chose on rank 0: if other hosts cannot reach it, set NCCL_SOCKET_IFNAME there")
    });
    format!("not all ranks came into NCCL{address}")
}

/// A rank whose communicator is not connected yet.
pub(super) struct Base {
    pub(super) group: Arc<DeviceGroup>,
    pub(super) streams: Streams,
    pub(super) store: Arc<dyn Store>,
    pub(super) device: Device,
    pub(super) options: NcclOptions,
    pub(super) limit: Limit,
    /// The least number of all ranks.
    pub(super) multiprocessors: u32,
    /// How long a rank may be silent.
    pub(super) lost_after: Duration,
    /// Whether the links between the GPUs are to be tested.
    pub(super) tests_links: bool,
}

impl Base {
    pub(super) fn ctas(&self) -> Ctas {
        Ctas::new(&self.options, self.limit, self.multiprocessors)
    }

    /// Connects to the other ranks in NCCL, with the id that rank 0 creates.
    pub(super) fn connect(&self) -> std::result::Result<Comm, WaitError> {
        let group = &*self.group;
        let cannot =
            |error: rendezvous::Error| WaitError::Nccl(NcclFailure::other("exchanging NCCL's id", &error.to_string()));
        self.streams.bind().map_err(cuda_failure)?;
        self.streams.trim_pool();
        if group.rank == 0 {
            let id = UniqueId::new();
            // Empty if there is no id, so that the others fail too.
            let bytes = id.as_ref().map_or(Vec::new(), UniqueId::to_bytes);
            self.store.set(ID, &bytes).map_err(cannot)?;
            id?;
        }
        let id = identity::await_id(&*self.store, ID, group, "exchanging NCCL's id")?;
        let mut check = cancellation_check(group, "init_process_group".to_string(), absence(&id), PATIENCE);
        let mut comm = Comm::connect(&id, group.rank, group.world_size, &self.options, self.ctas(), &mut check)?;
        // All ranks have come into NCCL, so they have read these.
        if group.rank == 0 {
            discard(&*self.store, ID);
        }
        discard(&*self.store, &identity::reports(&*self.store, group.rank, group.world_size).key(group.rank));
        if self.tests_links && group.world_size > 1 {
            links::test(&mut comm, &self.streams, group)?;
        }
        Ok(comm)
    }

    pub(super) fn start_heartbeat_monitor(&self, health_store: HealthStore) -> Result<JoinHandle<()>> {
        let (group, lost_after) = (self.group.clone(), self.lost_after);
        spawn(&self.group, "heartbeat_monitor", move || {
            HeartbeatMonitor { group: &group, health_store: &health_store, lost_after }.run();
        })
    }

    pub(super) fn start_poller(&self, comm_streams: &Arc<CommStreams>) -> Result<JoinHandle<()>> {
        let (group, comm_streams, streams) = (self.group.clone(), comm_streams.clone(), self.streams.clone());
        spawn(&self.group, "poller", move || {
            if let Err(error) = streams.bind() {
                group.suspect(SuspectedFailure::Broken(super::cuda_error(error)));
            }
            device_group::poll(&group, &*comm_streams);
        })
    }

    pub(super) fn start_watchdog(&self, comm_streams: &Arc<CommStreams>) -> Result<JoinHandle<()>> {
        let (group, comm_streams) = (self.group.clone(), comm_streams.clone());
        spawn(&self.group, "watchdog", move || {
            let unasked = |suspected: &SuspectedFailure| device_group::without_asking(&group, suspected);
            device_group::watch(&group, &*comm_streams, &unasked);
        })
    }

    /// Ends the group since it could not be connected, and returns the reason.
    pub(super) fn give_up(&self, error: WaitError, heartbeat_monitor: JoinHandle<()>) -> Error {
        let rank = self.group.rank;
        let error = match error {
            // The rank that has failed says so in the store, or sends no more heartbeats.
            WaitError::Nccl(remote) if remote.is_remote => {
                WaitError::Group(WaitError::Nccl(remote).end_group(&self.group))
            }
            own => own,
        };
        let failure = match &error {
            WaitError::Nccl(failure) => Failure::PeerFailed { peer: rank, reason: failure.to_string() },
            WaitError::Group(failure) => failure.clone(),
        };
        let ours = self.group.fail(failure.clone()) == failure;
        self.group.leave();
        join(heartbeat_monitor);
        // This rank's own error is returned unchanged.
        let other = self.group.failure().filter(|_| !ours);
        other.map_or_else(|| error.into_error(rank), Error::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_for_nccl_names_the_address_of_rank_0() {
        let mut bytes = [0; 128];
        bytes[8..10].copy_from_slice(&2u16.to_ne_bytes());
        bytes[10..16].copy_from_slice(&[0x1f, 0x90, 172, 17, 0, 1]);
        let group = DeviceGroup::new(1, 2, Duration::ZERO, None);
        let reason = absence(&UniqueId::from_bytes(&bytes).unwrap());
        let error = cancellation_check(&group, "a test".to_string(), reason, PATIENCE)().unwrap_err().to_string();
        assert!(error.contains("at 172.17.0.1:8080") && error.contains("NCCL_SOCKET_IFNAME"), "{error}");
    }

    #[test]
    fn numbers_are_read_as_c_does() {
        assert!(["1", " 1\n", "01", "0x1", "+1"].into_iter().all(is_one));
        assert!(!["0", "", "10", "-1", "0x10", "yes"].into_iter().any(is_one));
    }
}
