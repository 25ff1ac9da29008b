//! The step of a group's construction that decides what its data travels through.
use super::communicator::CpuTransport;
use super::connect::{Connections, Connector};
use super::shm::{Layout, Meeting, Room, meet};
use super::transport::{Stall, Transport};
use crate::Result;

impl Connector<'_> {
    /// Replaces the data and direct connections by shared memory, where all ranks have it. `part` is what a slot holds
    /// for each peer.
    pub(super) fn share(
        &self,
        connections: Connections,
        wanted: CpuTransport,
        part: usize,
    ) -> Result<(Connections, Option<Room>)> {
        let Connections { data, direct, control } = connections;
        let layout = (wanted != CpuTransport::Tcp).then(|| Layout::new(self.terms.world_size, part));
        let transport = Transport::new(data);
        let meeting = meet(&transport, self.rank, self.terms.world_size, layout, self.deadline);
        match meeting.map_err(|stall| self.stalled(stall))? {
            Meeting::Room(room) => {
                let none = || (0..self.terms.world_size).map(|_| None).collect();
                Ok((Connections { data: none(), direct: none(), control }, Some(room)))
            }
            Meeting::Apart { peers, reason, .. } if wanted == CpuTransport::SharedMemory => {
                Err(self.failed(&peers, format!("they share no memory with this rank: {reason}")))
            }
            Meeting::Apart { peers, reason, same_host } => {
                if same_host && wanted != CpuTransport::Tcp {
                    log::warn!(
                        "rank {}: no memory is shared with rank(s) {peers:?} on this host: {reason}. Data travels over \
                         TCP, which is slower",
                        self.rank
                    );
                } else {
                    log::debug!("rank {}: data travels over TCP ({peers:?}: {reason})", self.rank);
                }
                Ok((Connections { data: transport.into_sockets(), direct, control }, None))
            }
        }
    }

    fn stalled(&self, stall: Stall) -> crate::Error {
        match stall {
            Stall::TimedOut { peers } => self.failed(&peers, "they do not say what memory they share"),
            Stall::Closed { peer, reason } => self.failed(&[peer], format!("it closed the connection ({reason})")),
            Stall::Header { peer, .. } => self.failed(&[peer], "it is in a call already"),
            Stall::System(reason) => self.failed(&[], reason),
        }
    }
}
