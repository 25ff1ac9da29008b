//! The step of a group's construction that decides what its data travels through.
use super::connect::{Connections, Connector};
use super::hosts::Hosts;
use super::options::CpuTransport;
use super::shm::{Discovered, Discovery, Layout, ShmGroup};
use super::transport::Transport;
use super::transport_error::TransportError;
use crate::Result;

/// What a rank's data travels through: this rank's share of it.
pub(super) struct DataPath {
    /// To the ranks of other hosts; all control connections.
    pub(super) connections: Connections,
    pub(super) hosts: Hosts,
    /// To the ranks of this host, where there are others.
    pub(super) shm: Option<ShmGroup>,
    /// That of all groups of the group; `None` where there are none.
    pub(super) layout: Option<Layout>,
}

impl DataPath {
    /// Of a world of one.
    pub(super) fn none() -> Self {
        let connections = Connections { data: vec![], direct: vec![], control: vec![] };
        Self { connections, hosts: Hosts::new(0, 1, |_, _| true), shm: None, layout: None }
    }
}

impl Connector<'_> {
    /// Replaces the data and direct connections by shared memory between ranks that have it. `part` is what a slot holds
    /// for each peer, `label` what to take for the identity of the kernel.
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
                "rank {rank}: no memory is shared with rank(s) {apart:?} on this host: {reason}. Data travels over TCP, \
                 which is slower"
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
