//! One call through the shared memory of this rank's host.
use crate::error::Failure;
use crate::memory::Region;
use crate::session::Session;
use crate::shm::{ShmGroup, Streams};
use crate::transport_error::TransportError;

/// A call that moves data between the ranks of one host.
#[derive(Clone, Copy)]
pub(crate) struct ShmSession<'a> {
    pub(crate) session: Session<'a>,
    pub(crate) shm: &'a ShmGroup,
}

impl<'a> ShmSession<'a> {
    /// The streams of the collectives, for this call.
    pub(crate) fn streams(&self) -> Streams<'a> {
        let Session { deadline, arrival, .. } = self.session;
        self.shm.streams(self.session.outgoing_head(), deadline, arrival)
    }

    /// Sends to another rank of this host.
    pub(crate) fn send(&self, data: Region, peer: usize) -> Result<(), Failure> {
        let Session { deadline, .. } = self.session;
        let sent = self.shm.send(self.member(peer)?, &self.session.outgoing_head(), data, deadline);
        sent.map_err(|error| self.session.failure_inside(error))
    }

    /// Receives from another rank of this host.
    pub(crate) fn recv(&self, data: Region, peer: usize) -> Result<(), Failure> {
        let Session { deadline, .. } = self.session;
        let received = self.shm.receive(self.member(peer)?, &self.session.incoming_head(), data, deadline);
        received.map_err(|error| self.session.failure_inside(error))
    }

    /// The number of `peer` on this host.
    fn member(&self, peer: usize) -> Result<usize, Failure> {
        let absent = || TransportError::System(format!("there is no shared memory with rank {peer}"));
        self.session.hosts().member(peer).ok_or_else(|| self.session.failure(absent()))
    }
}
