//! Connections for data, which are made at first use.
//!
//! The thread that needs one says so and waits. The monitors of both ranks make it, whatever their other threads are doing, so
//! the order in which ranks come to their calls does not matter.
use super::door::{Door, Event};
use super::frame::Frame;
use super::group::Group;
use super::handshake::Kind;
use super::transport::Transport;
use super::transport_error::TransportError;
use crate::backend::call::Channel;
use crate::error::Failure;
use crate::panic::lock;
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// How long a rank waits for a higher one to call it for data before it asks for that: in most calls, both
/// need the connection. A message is asked for at once, since it may be sent before it is awaited.
const COURTESY: Duration = Duration::from_millis(10);

impl Group {
    /// The connections that `channel` uses, and their kind.
    pub(super) fn transport(&self, channel: Channel) -> (&Transport, Kind) {
        match channel {
            Channel::Collectives => (&self.data, Kind::Data),
            Channel::SendTo(_) | Channel::RecvFrom(_) => (&self.direct, Kind::Direct),
        }
    }

    /// Waits until `channel` has connections to all of `peers`.
    pub(super) fn reach(
        &self,
        channel: Channel,
        peers: impl Iterator<Item = usize>,
        deadline: Instant,
    ) -> Result<(), TransportError> {
        let (transport, kind) = self.transport(channel);
        let mut missing: Vec<usize> = peers.filter(|peer| !transport.has(*peer)).collect();
        if missing.is_empty() {
            return Ok(());
        }
        missing.sort_unstable();
        missing.dedup();
        let (higher, lower): (Vec<usize>, Vec<usize>) = missing.iter().partition(|peer| **peer > self.rank);
        self.want(&lower, kind);
        if kind == Kind::Data
            && !higher.is_empty()
            && let Some(reached) = self.wait_for(transport, &missing, deadline.min(Instant::now() + COURTESY))
        {
            return reached;
        }
        let asked = higher.into_iter().filter(|peer| !transport.has(*peer));
        asked.for_each(|peer| self.control.send(peer, &Frame::Call { kind }));
        self.wait_for(transport, &missing, deadline).unwrap_or_else(|| {
            let peers = missing.iter().copied().filter(|peer| !transport.has(*peer)).collect();
            Err(TransportError::TimedOut { peers })
        })
    }

    /// Waits for connections to `peers`; `None` if some are missing at `deadline`.
    fn wait_for(
        &self,
        transport: &Transport,
        peers: &[usize],
        deadline: Instant,
    ) -> Option<Result<(), TransportError>> {
        self.wait_until(deadline, |state| {
            let mut missing = peers.iter().copied().filter(|peer| !transport.has(*peer)).peekable();
            let Some(first) = missing.peek().copied() else { return Some(Ok(())) };
            let closed = |peer: usize, reason: &str| Some(Err(TransportError::Closed { peer, reason: reason.into() }));
            if state.failure.is_some() {
                return closed(first, "the group has failed");
            }
            missing.find_map(|peer| match (&state.peers[peer].unreachable, state.peers[peer].closed) {
                (Some(reason), _) => closed(peer, reason),
                (None, true) => closed(peer, "it ended before there was a connection for data"),
                (None, false) => None,
            })
        })
    }

    /// Makes the monitor call lower `peers` for connections of this kind.
    pub(super) fn want(&self, peers: &[usize], kind: Kind) {
        if !peers.is_empty() {
            lock(&self.state).wanted.extend(peers.iter().map(|peer| (*peer, kind)));
            self.control.wake();
        }
    }

    /// Makes the calls that threads want, and takes the connections that there are.
    pub(super) fn attend(&self, door: &mut Door) {
        for event in door.events() {
            match event {
                Event::Connected { peer, kind, socket } => self.add(peer, kind, socket),
                Event::Failed { peer, error } => self.set_unreachable(peer, error.to_string()),
                Event::Gone { peer } => self.set_unreachable(peer, "it takes no calls any more".into()),
                // It is a peer, as far as this rank can know.
                Event::Misfit { error } => {
                    self.fail(Failure::PeerFailed { peer: self.rank, reason: error.to_string() });
                }
            }
        }
        let wanted = std::mem::take(&mut lock(&self.state).wanted);
        for (peer, kind) in wanted {
            if self.of_kind(kind).is_some_and(|transport| peer < self.rank && !transport.has(peer)) {
                door.call(peer, kind);
            }
        }
    }

    fn of_kind(&self, kind: Kind) -> Option<&Transport> {
        match kind {
            Kind::Data => Some(&self.data),
            Kind::Direct => Some(&self.direct),
            Kind::Control => None,
        }
    }

    /// Takes a connection, unless the group has failed: then no thread waits for it, and it would not be closed.
    fn add(&self, peer: usize, kind: Kind, socket: TcpStream) {
        let state = lock(&self.state);
        if state.failure.is_none() && !self.of_kind(kind).is_some_and(|transport| transport.add(peer, socket)) {
            log::warn!("rank {}: a second {kind:?} connection of rank {peer} was turned away", self.rank);
        }
        drop(state);
        self.changed.notify_all();
    }

    fn set_unreachable(&self, peer: usize, reason: String) {
        lock(&self.state).peers[peer].unreachable = Some(reason);
        self.changed.notify_all();
    }
}
