//! One rank while it joins its group: what all steps of that need.
use crate::Error;
use crate::construction::Construction;
use crate::rendezvous::{Secret, Store};
use crate::tcp::handshake::{By, Handshake, HandshakeConfig, Kind};
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// This rank, as it introduces itself to its peers.
#[derive(Clone, Copy)]
pub(crate) struct Own {
    pub(crate) rank: usize,
    pub(crate) config: HandshakeConfig,
    /// How long a host may be unreachable.
    pub(crate) lost_after: Duration,
    /// The time limit of the construction.
    pub(crate) timeout: Duration,
}

impl Own {
    pub(crate) fn handshake(&self, nonce: u64, kind: Kind, control: By) -> Handshake {
        Handshake { nonce, rank: self.rank, kind, control, config: self.config }
    }

    /// The error if this rank has no connection to `peers` (empty: it is unknown to which).
    pub(crate) fn missing(&self, peers: &[usize], reason: impl Into<String>) -> Error {
        Error::Connect { rank: self.rank, peers: peers.to_vec(), timeout: self.timeout, reason: reason.into() }
    }
}

/// One rank that is connecting to its group.
pub(crate) struct Connector<'a> {
    pub(crate) own: Own,
    pub(crate) store: &'a dyn Store,
    pub(crate) secret: Option<Secret>,
    pub(crate) address: IpAddr,
    pub(crate) deadline: Instant,
    /// Says whether missing ranks will never come.
    pub(crate) construction: Construction<'a>,
}

impl Connector<'_> {
    pub(crate) fn left(&self) -> Duration {
        // Sockets do not accept a time-out of zero.
        self.deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
    }

    /// How long to wait for a peer before checking for cancellation.
    pub(crate) fn slice(&self) -> Duration {
        self.left().min(Duration::from_millis(500))
    }
}
