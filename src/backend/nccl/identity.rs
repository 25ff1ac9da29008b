//! The ranks' identities, exchanged before they connect: if NCCL would only refuse or hang, an error from here names
//! the ranks.
use super::comm::{UniqueId, WaitError};
use super::status::{NcclFailure, Version};
use crate::backend::Construction;
use crate::error::Failure;
use crate::random::random_bytes;
use crate::rendezvous::{Store, StoreReports};
use crate::{Error, Result};
use candle_ddp_base::wire::{Reader, Writer};
use candle_ddp_engine::device_group::DeviceGroup;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::OnceLock;
use std::time::Duration;

/// Facts about one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    /// The version of NCCL in NCCL's numbering.
    pub(super) nccl_version: i32,
    pub(super) host: String,
    /// The GPU's PCI bus id, as `nvidia-smi` shows it: `0000:3b:00`.
    pub(super) pci_bus_id: String,
    /// The same for all ranks of a process, and for no other rank. Numbers of processes repeat in containers.
    pub(super) process: u64,
    /// The kind of GPU, and its number, which differs between instances (MIG) of one GPU. Empty if the driver does not say.
    pub(super) gpu: String,
    pub(super) uuid: String,
    /// Whether its environment lets the links between GPUs be tested.
    pub(super) tests_links: bool,
    pub(super) multiprocessors: u32,
}

/// Tells the other ranks this one's identity, or why it cannot take part, and returns all ranks' identities. If any of
/// them cannot take part, all get an error that names it. `opened` holds the streams that this rank has opened, and its
/// identity.
pub(super) fn exchange<T>(
    store: &dyn Store,
    rank: usize,
    world_size: usize,
    timeout: Duration,
    opened: Result<(T, Identity)>,
) -> Result<(T, Vec<Identity>)> {
    let reports = reports(store, rank, world_size);
    let report = opened.as_ref().map(|(_, identity)| identity.encode());
    let told = reports.tell(report.as_deref().map_err(|error| *error as _));
    let (rest, _) = opened?;
    told?;
    let missing = |absent, _| Construction::missing(rank, absent, timeout);
    let failed = |(peer, reason)| Error::Group(Failure::PeerFailed { peer, reason });
    let reports = reports.hear(Some(timeout), missing)?.map_err(failed)?;
    let decode = |(peer, report): (usize, &Vec<u8>)| {
        let text = "it runs another version of candle-ddp: use the same version on all ranks";
        let strange = || failed((peer, text.to_string()));
        Identity::decode(report).ok_or_else(strange)
    };
    Ok((rest, reports.iter().enumerate().map(decode).collect::<Result<_>>()?))
}

/// The number of this process.
pub(super) fn process() -> Result<u64> {
    static PROCESS: OnceLock<u64> = OnceLock::new();
    let drawn = u64::from_le_bytes(random_bytes()?);
    Ok(*PROCESS.get_or_init(|| drawn))
}

/// How long a rank may be silent before it is considered dead.
pub(super) fn lost_after(identities: &[Identity]) -> Duration {
    let (alone, among_hosts) = (Duration::from_secs(10), Duration::from_secs(30));
    match identities.iter().map(|identity| &identity.host).collect::<HashSet<_>>().len() {
        0 | 1 => alone,
        // Page faults, core dumps and file servers hold up more ranks of a large job, and a store serves more of them.
        _ => among_hosts + Duration::from_secs(identities.len() as u64 / 16),
    }
}

/// A warning if the ranks have different GPUs.
pub(super) fn difference(identities: &[Identity]) -> Option<String> {
    let first = identities.first()?;
    let rank = identities.iter().position(|other| other.gpu != first.gpu)?;
    Some(format!(
        "rank 0 has a GPU {}, rank {rank} a GPU {}: every step takes as long as on the slowest, and results are not the same \
         bits as on GPUs of one kind, also with virtual ranks",
        first.gpu, identities[rank].gpu
    ))
}

/// The keys of the exchange.
pub(super) fn reports(store: &dyn Store, rank: usize, world_size: usize) -> StoreReports<'_> {
    StoreReports { store, topic: "identity", rank, world_size }
}

/// Checks that ranks are compatible: one version of NCCL, a process each, and a GPU each unless `shared_gpus` are allowed.
pub(super) fn check(identities: &[Identity], shared_gpus: bool) -> Result<()> {
    if let Some(first) = identities.first()
        && let Some(rank) = identities.iter().position(|other| other.nccl_version != first.nccl_version)
    {
        let other = &identities[rank];
        return Err(Error::Unavailable {
            what: "a group of ranks with different versions of NCCL".to_string(),
            hint: format!(
                "rank 0 on {} has NCCL {}, rank {rank} on {} has {}: make all ranks load the same libnccl.so.2 (see \
                 `ldd PROGRAM` and LD_LIBRARY_PATH on both)",
                first.host_name(),
                Version(first.nccl_version),
                other.host_name(),
                Version(other.nccl_version)
            ),
        });
    }
    let mut processes: HashMap<u64, usize> = HashMap::new();
    for (rank, identity) in identities.iter().enumerate() {
        if let Some(other) = processes.insert(identity.process, rank) {
            return Err(Error::Unavailable {
                what: format!("a group over NCCL whose ranks {other} and {rank} are threads of one process"),
                hint: "NCCL would read the memory of one of its GPUs from the other, which candle's memory does not allow: \
                       start each rank as a process, with `ddprun`, or use `DataParallel`"
                    .to_string(),
            });
        }
    }
    if shared_gpus {
        return Ok(());
    }
    let mut owners: HashMap<(&str, &str), usize> = HashMap::new();
    for (rank, identity) in identities.iter().enumerate() {
        if let Some(other) = owners.insert((&identity.host, &identity.pci_bus_id), rank) {
            let cure = if identities[other].uuid == identity.uuid {
                "give each rank its own GPU (start no more ranks than GPUs on a host, and let LOCAL_RANK or \
                 CUDA_VISIBLE_DEVICES choose)"
            } else {
                "on instances (MIG) of it, which NCCL does not connect: give each rank a whole GPU (`nvidia-smi -mig 0` ends \
                 MIG), or start one rank"
            };
            return Err(Error::invalid(
                "device",
                format!(
                    "ranks {other} and {rank} are both on the GPU {} of host {}: {cure}",
                    identity.pci_bus_id,
                    identity.host_name()
                ),
            ));
        }
    }
    Ok(())
}

impl Identity {
    fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.u32(self.nccl_version.cast_unsigned()).text(&self.host).text(&self.pci_bus_id).u64(self.process);
        writer.text(&self.gpu).text(&self.uuid).u32(u32::from(self.tests_links)).u32(self.multiprocessors);
        writer.0
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader(bytes);
        Some(Self {
            nccl_version: reader.u32()?.cast_signed(),
            host: reader.text()?,
            pci_bus_id: reader.text()?,
            process: reader.u64()?,
            gpu: reader.text()?,
            uuid: reader.text()?,
            tests_links: reader.u32()? != 0,
            multiprocessors: reader.u32()?,
        })
    }

    /// The host's name, without the part that makes it unique.
    fn host_name(&self) -> &str {
        self.host.split(' ').next().unwrap_or(&self.host)
    }
}

/// Waits for NCCL's id, which another rank writes under `key`, unless the group fails first.
pub(super) fn await_id(
    store: &dyn Store,
    key: &str,
    group: &DeviceGroup,
    operation: &'static str,
) -> std::result::Result<UniqueId, WaitError> {
    let cannot = |reason: &dyn fmt::Display| WaitError::Nccl(NcclFailure::other(operation, &reason.to_string()));
    let ended = || group.failure().map_or(Ok(()), |failure| Err(failure.into()));
    if let Err(error) = store.wait_cancellable(&[key], Some(group.timeout), &ended) {
        return Err(group.failure().map_or_else(|| cannot(&error), WaitError::Group));
    }
    let bytes = store.get(key).map_err(|error| cannot(&error))?;
    let none = || NcclFailure::of_another_rank(operation, "the other rank could not make one").into();
    UniqueId::from_bytes(&bytes).ok_or_else(none)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::HashStore;
    use std::sync::atomic::{AtomicU64, Ordering};

    fn identity(version: i32, host: &str, gpu: &str) -> Identity {
        static PROCESSES: AtomicU64 = AtomicU64::new(0);
        let process = PROCESSES.fetch_add(1, Ordering::Relaxed);
        let (nccl_version, host, pci_bus_id) = (version, host.to_string(), gpu.to_string());
        let (gpu, uuid) = ("H100".to_string(), "1".to_string());
        Identity { nccl_version, host, pci_bus_id, process, gpu, uuid, tests_links: true, multiprocessors: 132 }
    }

    const TIMEOUT: Duration = Duration::from_secs(5);

    /// The results of two ranks when rank 1 reports `second`.
    fn exchanged(second: std::result::Result<Identity, &'static str>) -> [Result<Vec<Identity>>; 2] {
        let store = HashStore::new(TIMEOUT);
        let (store, second) = (&store, &second);
        std::thread::scope(|scope| {
            let ranks = [0, 1].map(|rank| {
                scope.spawn(move || {
                    let opened = match (rank, second) {
                        (0, _) => Ok(((), identity(22809, "a", "0000:3b:00"))),
                        (_, Ok(second)) => Ok(((), second.clone())),
                        (_, Err(reason)) => Err(Error::invalid("device", *reason)),
                    };
                    exchange(store, rank, 2, TIMEOUT, opened).map(|((), identities)| identities)
                })
            });
            ranks.map(|rank| rank.join().unwrap())
        })
    }

    #[test]
    fn all_ranks_hear_of_each_other() {
        let mut expected = [identity(22809, "a", "0000:3b:00"), identity(22809, "b", "0000:3b:00")];
        for heard in exchanged(Ok(expected[1].clone())) {
            let heard = heard.unwrap();
            expected[0].process = heard[0].process;
            assert_eq!(heard, expected);
            check(&heard, false).unwrap();
        }
    }

    #[test]
    fn a_rank_that_cannot_take_part_is_an_error_on_all() {
        let errors = exchanged(Err("no GPU")).map(|heard| heard.unwrap_err().to_string());
        assert_eq!(errors, ["rank 1 ended the group: device: no GPU", "device: no GPU"]);
    }

    #[test]
    fn a_rank_that_does_not_come_is_named() {
        let store = HashStore::new(TIMEOUT);
        let opened = Ok(((), identity(22809, "a", "x")));
        let error = exchange(&store, 1, 3, Duration::from_millis(20), opened).unwrap_err().to_string();
        let expected =
            "rank 1 has no connection to rank(s) [0, 2] (time-out 20ms): they have not come to the rendezvous";
        assert!(error.contains(expected), "{error}");
    }

    #[test]
    fn waiting_for_an_id_ends_with_the_group() {
        let group = DeviceGroup::new(1, 2, Duration::from_secs(600), None);
        let failure = Failure::PeerFailed { peer: 0, reason: "no GPU".to_string() };
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| await_id(&HashStore::new(TIMEOUT), "id", &group, "meeting"));
            std::thread::sleep(Duration::from_millis(50));
            group.fail(failure.clone());
            let stopped = waiting.join().unwrap().err();
            assert!(matches!(&stopped, Some(WaitError::Group(heard)) if *heard == failure), "{stopped:?}");
        });
    }

    #[test]
    fn what_does_not_fit_together_is_refused_by_name() {
        let versions = [identity(22809, "a 1", "x"), identity(22809, "a 1", "y"), identity(22605, "b 2", "x")];
        let error = check(&versions, true).unwrap_err().to_string();
        assert!(error.contains("rank 0 on a has NCCL 2.28.9, rank 2 on b has 2.26.5"), "{error}");
        let mut shared = [
            identity(22809, "a 1", "0000:3b:00"),
            identity(22809, "b 1", "0000:3b:00"),
            identity(22809, "a 1", "0000:3b:00"),
        ];
        let error = check(&shared, false).unwrap_err().to_string();
        assert!(error.contains("ranks 0 and 2 are both on the GPU 0000:3b:00 of host a"), "{error}");
        check(&shared, true).unwrap();
        shared[2].uuid = "2".to_string();
        let error = check(&shared, false).unwrap_err().to_string();
        assert!(error.contains("of host a: on instances (MIG) of it"), "{error}");
        assert_eq!(difference(&shared), None);
        shared[1].gpu = "A100".to_string();
        let warning = difference(&shared).unwrap();
        assert!(warning.contains("rank 0 has a GPU H100, rank 1 a GPU A100"), "{warning}");
        let mut threads = [0, 1, 2].map(|gpu| identity(22809, "a 1", &gpu.to_string()));
        threads[2].process = threads[0].process;
        let error = check(&threads, true).unwrap_err().to_string();
        assert!(error.contains("ranks 0 and 2 are threads of one process"), "{error}");
    }

    #[test]
    fn ranks_of_several_hosts_may_be_silent_for_longer() {
        let seconds = |hosts: u64, ranks: u64| {
            let ranks: Vec<_> = (0..ranks).map(|rank| identity(22809, &(rank % hosts).to_string(), "x")).collect();
            lost_after(&ranks).as_secs()
        };
        assert_eq!([seconds(1, 8), seconds(2, 16), seconds(64, 512)], [10, 31, 62]);
    }
}
