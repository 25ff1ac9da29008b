//! Connections that are made at first use: for data, and, between ranks that had nothing to do with each other before, for
//! control.
//!
//! The thread that needs one says so and waits. The monitors of both ranks make it, whatever their other threads are doing, so
//! the order in which ranks come to their calls does not matter.
use crate::call::Channel;
use crate::error::Failure;
use crate::group::Group;
use crate::panic::lock;
use crate::tcp::door::{Door, Event};
use crate::tcp::frame::Frame;
use crate::tcp::handshake::Kind;
use crate::tcp::transport::Transport;
use crate::transport_error::TransportError;
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// How long a rank waits for a higher one to call it for data before it calls or asks for that: in most calls, both
/// need the connection. For a message it does so at once, since it may be sent before it is awaited.
const COURTESY: Duration = Duration::from_millis(10);

const REFUSED: &str = "nobody listens at its address";

impl Group {
    /// The connections that `channel` uses, and their kind.
    pub(crate) fn transport(&self, channel: Channel) -> (&Transport, Kind) {
        match channel {
            Channel::Collectives => (&self.data, Kind::Data),
            Channel::SendTo(_) | Channel::RecvFrom(_) => (&self.direct, Kind::Direct),
        }
    }

    /// Waits until `channel` has connections to all of `peers`.
    pub(crate) fn reach(
        &self,
        channel: Channel,
        peers: impl Iterator<Item = usize>,
        deadline: Instant,
    ) -> Result<(), TransportError> {
        let (transport, kind) = self.transport(channel);
        let is_linked = |peer: usize| self.control.link(peer).is_some();
        let has = |peer: usize| transport.has(peer) && is_linked(peer);
        let mut missing: Vec<usize> = peers.filter(|peer| !has(*peer)).collect();
        if missing.is_empty() {
            return Ok(());
        }
        missing.sort_unstable();
        missing.dedup();
        let (higher, lower): (Vec<usize>, Vec<usize>) = missing.iter().partition(|peer| **peer > self.rank);
        let unlinked = |peers: &[usize]| peers.iter().copied().filter(|peer| !is_linked(*peer)).collect::<Vec<_>>();
        self.want(&unlinked(&lower), Kind::Control);
        self.want(&lower, kind);
        if kind == Kind::Data && !higher.is_empty() {
            match self.await_peers(&missing, has, deadline.min(Instant::now() + COURTESY)) {
                Err(TransportError::TimedOut { .. }) => {}
                reached => return reached,
            }
        }
        self.want(&unlinked(&higher), Kind::Control);
        self.await_peers(&unlinked(&missing), is_linked, deadline)?;
        let asked = higher.into_iter().filter(|peer| !transport.has(*peer));
        asked.for_each(|peer| self.control.send(peer, &Frame::Call { kind }));
        self.await_peers(&missing, has, deadline)
    }

    /// Waits until all of `peers` are there.
    fn await_peers(
        &self,
        peers: &[usize],
        is_there: impl Fn(usize) -> bool,
        deadline: Instant,
    ) -> Result<(), TransportError> {
        let missing = || peers.iter().copied().filter(|peer| !is_there(*peer));
        let reached = self.wait_until(deadline, |state| {
            let Some(first) = missing().next() else { return Some(Ok(())) };
            let closed = |peer: usize, reason: &str| Some(Err(TransportError::Closed { peer, reason: reason.into() }));
            if state.failure.is_some() {
                return closed(first, "the group has failed");
            }
            missing().find_map(|peer| match (&state.peers[peer].unreachable, state.peers[peer].closed) {
                (Some(reason), _) => closed(peer, reason),
                (None, true) => closed(peer, "it ended before there was a connection"),
                (None, false) => None,
            })
        });
        reached.unwrap_or_else(|| Err(TransportError::TimedOut { peers: missing().collect() }))
    }

    /// Makes the monitor call `peers` for connections of this kind.
    pub(crate) fn want(&self, peers: &[usize], kind: Kind) {
        if !peers.is_empty() {
            lock(&self.state).wanted.extend(peers.iter().map(|peer| (*peer, kind)));
            self.control.wake();
        }
    }

    /// Makes the calls that threads want, and takes the connections that there are.
    pub(crate) fn attend(&self, door: &mut Door) {
        for event in door.events() {
            match event {
                Event::Connected { peer, kind, socket, is_own } => {
                    if !self.add(peer, kind, socket, is_own) {
                        let rank = self.rank;
                        door.warn(format_args!(
                            "rank {rank}: a second {kind:?} connection of rank {peer} was turned away"
                        ));
                    }
                }
                Event::Answered { peer } => lock(&self.state).peers[peer].answers_calls = true,
                // A higher rank may be out of reach of this one's calls, and yet call.
                Event::Failed { peer, error } if peer < self.rank => self.set_unreachable(&[peer], &error.to_string()),
                Event::Failed { peer, error } => {
                    log::debug!("rank {} cannot connect to rank {peer}: {error}", self.rank);
                }
                Event::Gone { peer } => self.on_refused(door, peer),
                // It is a peer, as far as this rank can know.
                Event::Misfit { error } => {
                    self.fail(Failure::PeerFailed { peer: self.rank, reason: error.to_string() });
                }
            }
        }
        let wanted = std::mem::take(&mut lock(&self.state).wanted);
        for (peer, kind) in wanted {
            let has = match self.of_kind(kind) {
                Some(transport) => peer > self.rank || transport.has(peer),
                None => self.control.link(peer).is_some(),
            };
            if !has && !self.has_failed() {
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

    /// Takes a connection. If the group has failed, no thread waits for one for data, and it would not be closed; on one for
    /// control, the peer learns of the failure. Returns whether it is the first one.
    fn add(&self, peer: usize, kind: Kind, socket: TcpStream, is_own: bool) -> bool {
        let state = lock(&self.state);
        let is_first = match self.of_kind(kind) {
            Some(_) if state.failure.is_some() => true,
            Some(transport) => transport.add(peer, socket),
            None => self.control.add(peer, socket, is_own == (peer < self.rank)),
        };
        if is_first && kind == Kind::Control {
            self.greet(&state, peer);
        }
        drop(state);
        self.changed.notify_all();
        is_first
    }

    fn set_unreachable(&self, peers: &[usize], reason: &str) {
        log::debug!("rank {} cannot connect to rank(s) {peers:?}: {reason}", self.rank);
        let mut state = lock(&self.state);
        peers.iter().for_each(|peer| state.peers[*peer].unreachable = Some(reason.to_string()));
        drop(state);
        self.changed.notify_all();
    }

    /// Called when nobody listens at the address of `peer`. If it is a higher rank, the others of its host know more: it may have
    /// left, or be out of reach of this rank's calls.
    fn on_refused(&self, door: &mut Door, peer: usize) {
        let mut state = lock(&self.state);
        state.peers[peer].refuses = true;
        let host = self.hosts.with(peer);
        let (linked, others): (Vec<usize>, Vec<usize>) = host
            .iter()
            .filter(|rank| !state.peers[**rank].closed)
            .partition(|rank| self.control.link(**rank).is_some());
        let (refused, others): (Vec<usize>, Vec<usize>) = others.iter().partition(|rank| state.peers[**rank].refuses);
        drop(state);
        match others.first() {
            _ if peer < self.rank => self.set_unreachable(&[peer], REFUSED),
            _ if !linked.is_empty() => {}
            Some(other) => door.call(*other, Kind::Control),
            None => self.set_unreachable(&refused, REFUSED),
        }
    }
}
