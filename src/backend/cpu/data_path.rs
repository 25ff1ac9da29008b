//! Decides, while a group is created, how its data travels.
use super::connect::{Connections, Connector};
use super::hosts::Hosts;
use super::options::CpuTransport;
use super::shm::{Discovered, Discovery, Layout, ShmGroup};
use super::transport::Transport;
use super::transport_error::TransportError;
use crate::Result;
use crate::error::ranks;

/// How a rank's data travels.
pub(super) struct DataPath {
    /// Data and direct connections to the ranks of other hosts, and control connections to all ranks.
    pub(super) connections: Connections,
    pub(super) hosts: Hosts,
    /// The memory shared with the other ranks of this host; `None` if there are none.
    pub(super) shm: Option<ShmGroup>,
    /// The layout of shared memory on all hosts; `None` if no two ranks share memory.
    pub(super) layout: Option<Layout>,
}

impl DataPath {
    /// The data path of a world of one.
    pub(super) fn none() -> Self {
        let connections = Connections { data: vec![], direct: vec![], control: vec![] };
        Self { connections, hosts: Hosts::new(0, 1, |_, _| true), shm: None, layout: None }
    }
}

impl Connector<'_> {
    /// Replaces the data and direct connections by shared memory between ranks that have it. `part` is the number of
    /// bytes that a slot holds for each peer; `label` replaces the identity of the running kernel.
    pub(super) fn share(
        &self,
        connections: Connections,
        wanted: CpuTransport,
        part: usize,
        label: Option<&str>,
    ) -> Result<DataPath> {
        let Connections { data, mut direct, control } = connections;
        let (rank, world_size, deadline) = (self.rank, self.config.world_size, self.deadline);
        let transport = Transport::new(data);
        let shares = wanted != CpuTransport::Tcp;
        let is_cancelled = || self.construction.check().is_err();
        let discovery = Discovery {
            transport: &transport,
            rank,
            world_size,
            shares,
            part,
            label,
            deadline,
            is_cancelled: &is_cancelled,
        };
        let Discovered { hosts, shm, layout, apart, complaints } =
            discovery.meet().map_err(|error| self.transport_failed(error))?;
        let reason = match complaints.is_empty() {
            true => "they cannot map the memory of all ranks".to_string(),
            false => complaints.join("; "),
        };
        if wanted == CpuTransport::SharedMemory && hosts.count() > 1 {
            let others: Vec<usize> = (0..world_size).filter(|peer| hosts.member(*peer).is_none()).collect();
            return Err(self.failed(&others, format!("they share no memory with this rank: {reason}")));
        }
        if shares && !apart.is_empty() {
            log::warn!(
                "rank {rank}: no memory is shared with rank(s) {} on this host: {reason}. Data travels over TCP, \
                 which is slower",
                ranks(&apart)
            );
        }
        log::debug!("rank {rank}: the ranks that share memory are {:?}", hosts.all());
        let mut data = transport.into_sockets();
        for member in hosts.members() {
            data[*member] = None;
            direct[*member] = None;
        }
        let layout = layout.filter(|_| !hosts.are_single());
        Ok(DataPath { connections: Connections { data, direct, control }, hosts, shm, layout })
    }

    fn transport_failed(&self, error: TransportError) -> crate::Error {
        if let Err(cause) = self.construction.check() {
            return cause;
        }
        match error {
            TransportError::TimedOut { peers } => self.failed(&peers, "they do not say what memory they share"),
            TransportError::Closed { peer, .. } => self.gone(peer),
            TransportError::Header { peer, .. } => self.failed(&[peer], "it is in a call already"),
            TransportError::Locked => self.failed(&[], "a tensor's storage is locked"),
            TransportError::System(reason) => self.failed(&[], reason),
        }
    }
}
