//! One rank while it joins its group: what all steps of that need.
use super::handshake::{By, Handshake, HandshakeConfig, Kind};
use crate::Error;
use crate::backend::Construction;
use crate::rendezvous::{Secret, Store};
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// One rank that is connecting to its group.
pub(super) struct Connector<'a> {
    pub(super) store: &'a dyn Store,
    pub(super) rank: usize,
    pub(super) config: HandshakeConfig,
    pub(super) secret: Option<Secret>,
    pub(super) address: IpAddr,
    pub(super) timeout: Duration,
    pub(super) deadline: Instant,
    /// How long a host may be unreachable.
    pub(super) lost_after: Duration,
    /// Says whether missing ranks will never come.
    pub(super) construction: Construction<'a>,
}

/// What to do about missing ranks.
pub(super) const ABSENT: &str = "Have they created this group too (new_group with the same ranks), or ended? Look for the \
                                 first error in their output";

impl Connector<'_> {
    pub(super) fn handshake(&self, nonce: u64, kind: Kind) -> Handshake {
        Handshake { nonce, rank: self.rank, kind, control: By::Higher, config: self.config }
    }

    pub(super) fn left(&self) -> Duration {
        // Sockets do not accept a time-out of zero.
        self.deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
    }

    /// How long to wait for a peer before checking for cancellation.
    pub(super) fn slice(&self) -> Duration {
        self.left().min(Duration::from_millis(500))
    }

    pub(super) fn failed(&self, peers: &[usize], reason: impl Into<String>) -> Error {
        Error::Connect { rank: self.rank, peers: peers.to_vec(), timeout: self.timeout, reason: reason.into() }
    }
}
