//! Decides, while a group is created, how its data travels.
use crate::descriptors::{self, check_limit};
use crate::hosts::Hosts;
use crate::options::CpuTransport;
use crate::shm::{Discovered, Discovery, Layout, PeerInfo, ShmGroup};
use crate::tcp::connect::Connections;
use crate::tcp::connector::Connector;
use crate::{Error, Result};
use candle_ddp_base::text::ranks;

/// How a rank's data travels.
pub(crate) struct DataPath {
    /// The connections to the ranks of other hosts.
    pub(crate) connections: Connections,
    pub(crate) hosts: Hosts,
    /// The memory shared with the other ranks of this host; `None` if there are none.
    pub(crate) shm: Option<ShmGroup>,
    /// The layout of shared memory on all hosts; `None` if no two ranks share memory.
    pub(crate) layout: Option<Layout>,
}

impl DataPath {
    /// The data path of a world of one.
    pub(crate) fn none() -> Self {
        let connections = Connections { control: vec![], door: None };
        Self { connections, hosts: Hosts::new(0, &[0]), shm: None, layout: None }
    }
}

impl Connector<'_> {
    /// Meets the other ranks, finds those with which this one can share memory, and connects to the others. `part` is the
    /// number of bytes that a slot holds for each peer; `label` replaces the host's identity.
    pub(crate) fn join(&self, wanted: CpuTransport, part: usize, label: Option<&str>) -> Result<DataPath> {
        let shares = wanted != CpuTransport::Tcp;
        let met = self.meet(PeerInfo::own(shares, label))?;
        let Discovered { hosts, shm, layout, apart, complaints } = Discovery {
            rank: self.own.rank,
            infos: &met.infos,
            part,
            publish: &|topic, value| self.store.set(&topic.key(self.own.rank), value),
            collect: &|topic, ranks| self.collect(&|rank| topic.key(rank), ranks),
        }
        .meet()?;
        let reason = match complaints.is_empty() {
            true => "they cannot map the memory of all ranks".to_string(),
            false => complaints.join("; "),
        };
        let (rank, world_size) = (self.own.rank, self.own.config.world_size);
        let others: Vec<usize> = (0..world_size).filter(|peer| hosts.member(*peer).is_none()).collect();
        if wanted == CpuTransport::SharedMemory && !others.is_empty() {
            return Err(self.own.missing(&others, format!("they share no memory with this rank: {reason}")));
        }
        if shares && !apart.is_empty() {
            log::warn!(
                "rank {rank}: no memory is shared with rank(s) {} on this host: {reason}. Data travels over TCP, \
                 which is slower",
                ranks(&apart)
            );
        }
        log::debug!("rank {rank}: the ranks that share memory are {:?}", hosts.all());
        // Those for the monitors and for data, a call in progress, and the monitor's pipe. Calls between certain ranks need more.
        let partners = hosts.partners();
        check_limit(
            descriptors::open(),
            if partners == 0 { 0 } else { 2 * partners + 3 },
            &format!("connections to {partners} other rank(s)"),
        )
        .map_err(|reason| Error::invalid("ulimit -n", format!("rank {rank}: {reason}")))?;
        let connections = self.connect(met, &hosts)?;
        let layout = layout.filter(|_| !hosts.are_single());
        Ok(DataPath { connections, hosts, shm, layout })
    }
}
