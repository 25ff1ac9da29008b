//! Who the ranks are, told before they connect: what NCCL would only refuse, or hang on, is an error with names here.
use super::comm::{Stop, UniqueId};
use super::group::Group;
use super::status::NcclFailure;
use crate::backend::wire::{Reader, Writer};
use crate::error::Failure;
use crate::rendezvous::{Store, absent_ranks};
use crate::{Error, Result};
use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

/// Facts about one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    /// As NCCL numbers it.
    pub(super) nccl_version: i32,
    pub(super) host: String,
    /// Where the GPU sits, as `nvidia-smi` shows it: `0000:3b:00`.
    pub(super) pci_bus_id: String,
}

const PRESENT: u8 = 1;
const ABSENT: u8 = 0;

fn key(rank: usize) -> String {
    format!("identity/{rank}")
}

/// Tells the other ranks who this one is, or why it cannot take part.
pub(super) fn tell(store: &dyn Store, rank: usize, identity: std::result::Result<&Identity, &Error>) -> Result<()> {
    let mut writer = Writer::default();
    match identity {
        Ok(Identity { nccl_version, host, pci_bus_id }) => {
            writer.u8(PRESENT).u32(nccl_version.cast_unsigned()).text(host).text(pci_bus_id);
        }
        Err(error) => {
            writer.u8(ABSENT).text(&error.to_string());
        }
    }
    store.set(&key(rank), &writer.0)
}

/// Who all ranks are, once they have told. When any of them cannot take part, all get an error that names it.
pub(super) fn hear(store: &dyn Store, rank: usize, world_size: usize, timeout: Duration) -> Result<Vec<Identity>> {
    let keys: Vec<String> = (0..world_size).map(key).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    match store.wait(&keys, Some(timeout)) {
        Err(Error::StoreTimeout { .. }) => {
            let peers = absent_ranks(store, 0..world_size, &key)?;
            let reason = "it has not come to make the group: look for the first error in its output".to_string();
            return Err(Error::Connect { rank, peers, timeout, reason });
        }
        result => result?,
    }
    store.multi_get(&keys)?.iter().enumerate().map(|(peer, value)| decode(peer, value)).collect()
}

fn decode(peer: usize, bytes: &[u8]) -> Result<Identity> {
    let mut reader = Reader(bytes);
    let identity = match reader.u8() {
        Some(ABSENT) => {
            let reason = reader.text().unwrap_or_default();
            return Err(Failure::PeerFailed { peer, reason }.into());
        }
        _ => (|| {
            Some(Identity {
                nccl_version: reader.u32()?.cast_signed(),
                host: reader.text()?,
                pci_bus_id: reader.text()?,
            })
        })(),
    };
    let other = || Failure::PeerFailed { peer, reason: "it speaks another version of candle-ddp".to_string() };
    identity.ok_or_else(|| other().into())
}

/// Checks that ranks fit together: one version of NCCL, and a GPU each unless `shared_gpus` are allowed.
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
    if shared_gpus {
        return Ok(());
    }
    let mut owners: HashMap<(&str, &str), usize> = HashMap::new();
    for (rank, identity) in identities.iter().enumerate() {
        if let Some(other) = owners.insert((&identity.host, &identity.pci_bus_id), rank) {
            return Err(Error::invalid(
                "device",
                format!(
                    "ranks {other} and {rank} are both on the GPU {} of host {}: give each rank a GPU of its own (start \
                     no more ranks than GPUs on a host, and let LOCAL_RANK or CUDA_VISIBLE_DEVICES choose)",
                    identity.pci_bus_id,
                    identity.host_name()
                ),
            ));
        }
    }
    Ok(())
}

impl Identity {
    /// Without what makes it unique.
    fn host_name(&self) -> &str {
        self.host.split(' ').next().unwrap_or(&self.host)
    }
}

/// A version as NCCL numbers it, in the usual form.
pub(super) struct Version(pub(super) i32);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(version) = *self;
        // Up to 2.8 minor versions had one digit.
        let (major, rest, base) = if version < 10_000 {
            (version / 1000, version % 1000, 100)
        } else {
            (version / 10_000, version % 10_000, 100)
        };
        write!(f, "{major}.{}.{}", rest / base, rest % base)
    }
}

/// The id of NCCL's that another rank leaves under `key`, unless the group fails before it comes.
pub(super) fn await_id(
    store: &dyn Store,
    key: &str,
    group: &Group,
    operation: &'static str,
) -> std::result::Result<UniqueId, Stop> {
    let cannot = |reason: &dyn fmt::Display| Stop::Nccl(NcclFailure::other(operation, &reason.to_string()));
    let ended = || group.failure().map_or(Ok(()), |failure| Err(Error::from(failure)));
    if let Err(error) = store.wait_cancellable(&[key], Some(group.timeout), &ended) {
        return Err(group.failure().map_or_else(|| cannot(&error), Stop::Group));
    }
    let bytes = store.get(key).map_err(|error| cannot(&error))?;
    UniqueId::from_bytes(&bytes).ok_or_else(|| cannot(&"the other rank could not make one"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::HashStore;

    fn identity(version: i32, host: &str, gpu: &str) -> Identity {
        Identity { nccl_version: version, host: host.to_string(), pci_bus_id: gpu.to_string() }
    }

    const TIMEOUT: Duration = Duration::from_secs(5);

    #[test]
    fn all_ranks_hear_of_each_other() {
        let store = HashStore::new(TIMEOUT);
        let identities = [identity(22809, "a", "0000:3b:00"), identity(22809, "b", "0000:3b:00")];
        std::thread::scope(|scope| {
            for rank in 0..2 {
                let (store, identities) = (&store, &identities);
                scope.spawn(move || {
                    tell(store, rank, Ok(&identities[rank])).unwrap();
                    let heard = hear(store, rank, 2, TIMEOUT).unwrap();
                    assert_eq!(heard, identities);
                    check(&heard, false).unwrap();
                });
            }
        });
    }

    #[test]
    fn a_rank_that_cannot_take_part_is_an_error_on_all() {
        let store = HashStore::new(TIMEOUT);
        tell(&store, 0, Ok(&identity(22809, "a", "x"))).unwrap();
        tell(&store, 1, Err(&Error::invalid("device", "no GPU"))).unwrap();
        for rank in 0..2 {
            let error = hear(&store, rank, 2, TIMEOUT).unwrap_err().to_string();
            assert_eq!(error, "rank 1 ended the group: device: no GPU");
        }
    }

    #[test]
    fn a_rank_that_does_not_come_is_named() {
        let store = HashStore::new(TIMEOUT);
        tell(&store, 1, Ok(&identity(22809, "a", "x"))).unwrap();
        let error = hear(&store, 1, 3, Duration::from_millis(20)).unwrap_err().to_string();
        assert!(error.contains("rank 1 has no connection to rank(s) [0, 2]"), "{error}");
    }

    #[test]
    fn waiting_for_an_id_ends_with_the_group() {
        let group = Group::new(1, 2, Duration::from_secs(600));
        let failure = Failure::PeerFailed { peer: 0, reason: "no GPU".to_string() };
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| await_id(&HashStore::new(TIMEOUT), "id", &group, "meeting"));
            std::thread::sleep(Duration::from_millis(50));
            group.fail(failure.clone());
            let stopped = waiting.join().unwrap().err();
            assert!(matches!(&stopped, Some(Stop::Group(heard)) if *heard == failure), "{stopped:?}");
        });
    }

    #[test]
    fn what_does_not_fit_together_is_refused_by_name() {
        let versions = [identity(22809, "a 1", "x"), identity(22809, "a 1", "y"), identity(22605, "b 2", "x")];
        let error = check(&versions, true).unwrap_err().to_string();
        assert!(error.contains("rank 0 on a has NCCL 2.28.9, rank 2 on b has 2.26.5"), "{error}");
        let shared = [
            identity(22809, "a 1", "0000:3b:00"),
            identity(22809, "b 1", "0000:3b:00"),
            identity(22809, "a 1", "0000:3b:00"),
        ];
        let error = check(&shared, false).unwrap_err().to_string();
        assert!(error.contains("ranks 0 and 2 are both on the GPU 0000:3b:00 of host a"), "{error}");
        check(&shared, true).unwrap();
    }

    #[test]
    fn versions_are_written_as_usual() {
        let texts = [22809, 21800, 2708, 23000].map(|version| Version(version).to_string());
        assert_eq!(texts, ["2.28.9", "2.18.0", "2.7.8", "2.30.0"]);
    }
}
