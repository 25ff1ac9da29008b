//! The step of a group's construction that decides what its data travels through.
use super::communicator::CpuTransport;
use super::connect::{Connections, Connector};
use super::hosts::Hosts;
use super::shm::{Guest, Layout, Meeting, Room};
use super::transport::{Stall, Transport};
use crate::Result;

/// What a rank's data travels through: this rank's share of it.
pub(super) struct Ways {
    /// To the ranks of other hosts; all control connections.
    pub(super) connections: Connections,
    pub(super) hosts: Hosts,
    /// To the ranks of this host, where there are others.
    pub(super) room: Option<Room>,
    /// That of all rooms of the group; `None` where there are none.
    pub(super) layout: Option<Layout>,
}

impl Ways {
    /// Of a world of one.
    pub(super) fn none() -> Self {
        let connections = Connections { data: vec![], direct: vec![], control: vec![] };
        Self { connections, hosts: Hosts::new(0, 1, |_, _| true), room: None, layout: None }
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
    ) -> Result<Ways> {
        let Connections { data, mut direct, control } = connections;
        let (rank, world_size, deadline) = (self.rank, self.terms.world_size, self.deadline);
        let transport = Transport::new(data);
        let shares = wanted != CpuTransport::Tcp;
        let is_cancelled = || self.construction.check().is_err();
        let guest = Guest {
            transport: &transport,
            rank,
            world_size,
            shares,
            part,
            label,
            deadline,
            is_cancelled: &is_cancelled,
        };
        let Meeting { hosts, room, layout, apart, complaints } = guest.meet().map_err(|stall| self.stalled(stall))?;
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
        Ok(Ways { connections: Connections { data, direct, control }, hosts, room, layout })
    }

    fn stalled(&self, stall: Stall) -> crate::Error {
        if let Err(cause) = self.construction.check() {
            return cause;
        }
        match stall {
            Stall::TimedOut { peers } => self.failed(&peers, "they do not say what memory they share"),
            Stall::Closed { peer, .. } => self.gone(peer),
            Stall::Header { peer, .. } => self.failed(&[peer], "it is in a call already"),
            Stall::Locked => self.failed(&[], "a tensor's storage is locked"),
            Stall::System(reason) => self.failed(&[], reason),
        }
    }
}
