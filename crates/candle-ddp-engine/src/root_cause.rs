//! Finds the failure of the group that caused an error of the transport.
use crate::call::{Channel, Header};
use crate::error::Failure;
use crate::failure::{ExpiredCall, RankState, desync, diagnose};
use crate::session::Session;
use crate::transport_error::TransportError;

impl Session<'_> {
    /// Finds the cause of `error`, and ends the group with it.
    pub(crate) fn failure(&self, error: TransportError) -> Failure {
        let failure = match error {
            TransportError::Closed { peer, reason } => {
                return self.group.fail_closed(self.channel, peer, &reason);
            }
            TransportError::Locked => self.expired(&[]).locked(),
            TransportError::System(reason) => Failure::PeerFailed { peer: self.rank(), reason },
            TransportError::Header { peer, received } => self.mismatch(peer, &received),
            TransportError::TimedOut { peers } => diagnose(&self.expired(&peers), &self.group.query()),
        };
        self.group.fail(failure)
    }

    /// Like `failure`, for an error in shared memory, where ranks are numbered by their position on this host.
    pub(crate) fn failure_inside(&self, error: TransportError) -> Failure {
        let members = self.hosts().members();
        self.failure(match error {
            TransportError::TimedOut { peers } => {
                TransportError::TimedOut { peers: peers.into_iter().map(|peer| members[peer]).collect() }
            }
            TransportError::Closed { peer, reason } => TransportError::Closed { peer: members[peer], reason },
            TransportError::Header { peer, received } => TransportError::Header { peer: members[peer], received },
            error @ (TransportError::Locked | TransportError::System(_)) => error,
        })
    }

    fn expired<'p>(&self, awaited: &'p [usize]) -> ExpiredCall<'p> {
        let Header { sequence, call } = self.header;
        let (rank, timeout, channel) = (self.rank(), self.group.timeout, self.channel);
        ExpiredCall { rank, timeout, channel, sequence, call, awaited: Some(awaited) }
    }

    /// The failure if a peer is in another call.
    fn mismatch(&self, peer: usize, received: &[u8; Header::BYTES]) -> Failure {
        let Header { sequence, call: ours } = self.header;
        let Some(theirs) = Header::decode(received) else {
            let reason = format!(
                "the data from rank {peer} does not come from this engine: it begins with {received:02x?}. Run the \
                 same candle-ddp on all ranks"
            );
            return Failure::PeerFailed { peer: self.rank(), reason };
        };
        if theirs.call.lacks_text() {
            // The answers bring the texts.
            self.group.query();
        }
        if theirs.sequence < sequence
            && let Some(ours) = self.group.call_at(self.channel, theirs.sequence)
        {
            // This rank's call with that number did not read what the peer sent.
            return desync(theirs.sequence, (self.rank(), ours), (peer, theirs.call));
        }
        if theirs.sequence > sequence
            && self.channel == Channel::Collectives
            && let RankState::Running(report) = &self.group.query()[peer]
            && let Some(theirs) = report.call_at(sequence)
        {
            // The peer's call with this number sent nothing to this rank, and the peer has continued.
            return desync(sequence, (self.rank(), ours), (peer, theirs));
        }
        desync(sequence, (self.rank(), ours), (peer, theirs.call))
    }
}
