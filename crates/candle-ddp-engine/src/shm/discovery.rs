//! Finds out which ranks can share memory.
//!
//! Ranks on one kernel, in the same namespaces and of the same user, should be able to open each other's files. The lowest
//! of them creates the memory of their host, all others try to map it, and the lowest tells all ranks of the group who could.
//! Nothing is configured, and host names do not matter. All of it goes through the store.
use super::board::{Board, Room};
use super::group::ShmGroup;
use super::layout::Layout;
use super::peer_info::{MemoryInfo, PeerInfo};
use super::segment::Memory;
use crate::Result;
use crate::host::host_identity;
use crate::hosts::Hosts;
use crate::random::random_bytes;
use candle_ddp_base::wire::{Reader, Writer};
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::sync::Arc;

/// The result of the discovery.
pub(crate) struct Discovered {
    pub(crate) hosts: Hosts,
    /// `None` on a rank that is alone on its host.
    pub(crate) shm: Option<ShmGroup>,
    /// The layout of shared memory on all hosts; `None` if no two ranks could share memory.
    pub(crate) layout: Option<Layout>,
    /// Ranks that run on the same kernel but could not share memory with this one.
    pub(crate) apart: Vec<usize>,
    /// The reason why they could not, as far as this rank knows.
    pub(crate) complaints: Vec<String>,
}

/// One rank's part in the discovery.
pub(crate) struct Discovery<'a> {
    pub(crate) rank: usize,
    /// By rank.
    pub(crate) infos: &'a [PeerInfo],
    /// The number of bytes that a slot holds for each peer.
    pub(crate) part: usize,
    /// Tells the others something of this kind.
    pub(crate) publish: &'a Publish<'a>,
    /// The values that the given ranks have published.
    pub(crate) collect: &'a Collect<'a>,
}

type Publish<'a> = dyn Fn(Topic, &[u8]) -> Result<()> + 'a;
type Collect<'a> = dyn Fn(Topic, &[usize]) -> Result<Vec<Vec<u8>>> + 'a;

/// A rank's message to the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Topic {
    /// Where the memory of the host is, or why there is none.
    Memory,
    /// Whether the rank has mapped it: nothing, or why not.
    Mapped,
    /// The ranks that have mapped it.
    Host,
}

impl Topic {
    pub(crate) const ALL: [Self; 3] = [Self::Memory, Self::Mapped, Self::Host];

    pub(crate) fn key(self, rank: usize) -> String {
        let topic = match self {
            Self::Memory => "memory",
            Self::Mapped => "mapped",
            Self::Host => "host",
        };
        format!("{topic}/{rank}")
    }
}

impl PeerInfo {
    /// This rank's info; `label` replaces the host's identity, for tests.
    pub(crate) fn own(shares: bool, label: Option<&str>) -> Self {
        let mut hasher = DefaultHasher::new();
        for namespace in ["pid", "user"] {
            std::fs::read_link(Path::new("/proc/self/ns").join(namespace)).ok().hash(&mut hasher);
        }
        rustix::process::geteuid().as_raw().hash(&mut hasher);
        Self { kernel: host_identity(label).to_be_bytes(), room: hasher.finish(), shares }
    }
}

impl Discovery<'_> {
    /// Finds the hosts, together with all other ranks.
    pub(crate) fn meet(&self) -> Result<Discovered> {
        let Self { rank, infos, .. } = *self;
        let mut complaints = Vec::new();
        let mut rooms: BTreeMap<_, Vec<usize>> = BTreeMap::new();
        for (peer, info) in infos.iter().enumerate().filter(|(_, info)| info.shares) {
            rooms.entry((info.kernel, info.room)).or_default().push(peer);
        }
        rooms.retain(|_, ranks| ranks.len() > 1);
        // Segments have the same layout on all hosts, so that all ranks divide data alike.
        let largest = rooms.values().map(Vec::len).max();
        let layout = largest.map(|largest| Layout::new(largest, self.part));
        let own = rooms.get(&(infos[rank].kernel, infos[rank].room)).filter(|_| infos[rank].shares);
        let memory = match (layout, own) {
            (Some(layout), Some(room)) => self.map(layout, room, &mut complaints)?,
            _ => None,
        };

        // The lowest ranks of the hosts, by rank.
        let mut labels: Vec<usize> = (0..infos.len()).collect();
        let leaders: Vec<usize> = rooms.values().map(|ranks| ranks[0]).collect();
        let mut members = Vec::new();
        for (leader, host) in leaders.iter().zip((self.collect)(Topic::Host, &leaders)?) {
            let mut reader = Reader(&host);
            let found: Vec<usize> = std::iter::from_fn(|| reader.rank()).filter(|rank| *rank < labels.len()).collect();
            if let Some(first) = found.first() {
                found.iter().for_each(|rank| labels[*rank] = *first);
            }
            if own.is_some_and(|room| room[0] == *leader) {
                members = found;
            }
        }
        let hosts = Hosts::new(rank, &labels);
        let apart = (0..infos.len()).filter(|peer| hosts.member(*peer).is_none());
        let apart: Vec<usize> = apart.filter(|peer| infos[*peer].kernel == infos[rank].kernel).collect();
        if complaints.is_empty() && apart.iter().any(|peer| infos[*peer].room != infos[rank].room) {
            complaints.push("they are in another namespace of processes, or belong to another user".to_string());
        }
        let shm = match (layout, memory, own) {
            (Some(layout), Some(memory), Some(room)) if members.len() > 1 && members.contains(&rank) => {
                let places: Vec<usize> =
                    members.iter().filter_map(|member| room.iter().position(|rank| rank == member)).collect();
                Some(ShmGroup::new(hosts.index(), layout, memory, self.room(room), &places))
            }
            _ => None,
        };
        Ok(Discovered { hosts, shm, layout, apart, complaints })
    }

    fn room(&self, ranks: &[usize]) -> Room {
        Room { ranks: ranks.len(), group: self.infos.len() }
    }

    /// Maps the memory of the ranks in `room`, among them this one; the lowest makes it, and tells all ranks who has it.
    fn map(&self, layout: Layout, room: &[usize], complaints: &mut Vec<String>) -> Result<Option<Arc<Memory>>> {
        let (leader, leads) = (room[0], room[0] == self.rank);
        let sizes = ShmGroup::sizes(self.room(room), &layout);
        let opened = if leads {
            match create(sizes) {
                Ok((memory, place)) => {
                    (self.publish)(Topic::Memory, &place.encode())?;
                    Ok(memory)
                }
                Err(reason) => {
                    (self.publish)(Topic::Host, &[])?;
                    (self.publish)(Topic::Memory, reason.as_bytes())?;
                    complaints.push(reason);
                    return Ok(None);
                }
            }
        } else {
            let place = (self.collect)(Topic::Memory, &[leader])?.concat();
            let Some(place) = MemoryInfo::decode(&place) else {
                complaints.push(format!("rank {leader}: {}", String::from_utf8_lossy(&place)));
                return Ok(None);
            };
            Memory::open(place.pid, place.fd, &place.name(), sizes.0, sizes.1)
                .map_err(|error| format!("cannot map the memory that rank {leader} has made: {error}"))
        };
        let opened = opened.map(Arc::new);
        let reserved = opened.as_ref().map_err(String::clone).and_then(|memory| {
            let place = room.iter().position(|rank| *rank == self.rank).unwrap_or(0);
            let range = ShmGroup::reserved(place, self.room(room), &layout);
            let size = range.len();
            memory.reserve(range).map_err(|error| format!("cannot reserve {size} bytes of shared memory: {error}"))?;
            Board::enter(memory, place, self.room(room));
            Ok(())
        });
        let reason = reserved.err().unwrap_or_default();
        (self.publish)(Topic::Mapped, reason.as_bytes())?;
        if leads {
            let reports = (self.collect)(Topic::Mapped, room)?;
            let mut host = Writer::default();
            for (rank, report) in room.iter().zip(reports) {
                if report.is_empty() {
                    host.u32(*rank as u32);
                } else if *rank != self.rank {
                    complaints.push(format!("rank {rank}: {}", String::from_utf8_lossy(&report)));
                }
            }
            (self.publish)(Topic::Host, &host.0)?;
        }
        let is_mapped = reason.is_empty();
        complaints.extend((!is_mapped).then_some(reason));
        Ok(opened.ok().filter(|_| is_mapped))
    }
}

/// Creates the memory of a host. The error says what could not be done.
fn create((mapped, size): (usize, usize)) -> Result<(Memory, MemoryInfo), String> {
    let created = random_bytes().map_err(|error| error.to_string()).and_then(|token| {
        let mut place = MemoryInfo { pid: 0, fd: 0, token: u128::from_le_bytes(token) };
        let memory = Memory::create(&place.name(), mapped, size).map_err(|error| error.to_string())?;
        (place.pid, place.fd) = memory.place();
        Ok((memory, place))
    });
    created.map_err(|error| format!("cannot create {size} bytes of shared memory: {error}"))
}
