//! The keys by which a rank of a job with a secret and its peers prove who they are.
use crate::rendezvous::Secret;
use crate::tcp::handshake::{By, Exchange, Handshake, Kind};
use std::collections::HashMap;

/// The secret of the job, which proves control connections, and the keys that these have given this rank's pairs, which prove
/// other connections.
pub(crate) struct Keys {
    pub(crate) secret: Option<Secret>,
    /// By peer, and by control connection.
    pub(crate) pairs: HashMap<(usize, By), Secret>,
}

impl Keys {
    pub(crate) fn new(secret: Option<Secret>) -> Self {
        Self { secret, pairs: HashMap::new() }
    }

    /// The control connection with `peer` whose key proves others.
    pub(crate) fn control_of(&self, peer: usize) -> Option<By> {
        By::ALL.into_iter().find(|by| self.pairs.contains_key(&(peer, *by)))
    }

    /// Whether this rank could prove who it is on a connection of this kind with `peer`, or need not.
    pub(crate) fn suffice(&self, peer: usize, kind: Kind) -> bool {
        kind == Kind::Control || self.secret.is_none() || self.control_of(peer).is_some()
    }

    /// The key of a connection with `peer`, of which `handshake` is either end's; `None` if this rank does not know it.
    pub(crate) fn get(&self, peer: usize, handshake: &Handshake) -> Option<&Secret> {
        match handshake.kind {
            Kind::Control => self.secret.as_ref(),
            Kind::Data | Kind::Direct => self.pairs.get(&(peer, handshake.control)),
        }
    }

    /// Adds the key that a new control connection gives the pair, unless it has one: a second connection is not used.
    pub(crate) fn add(&mut self, peer: usize, by: By, exchange: &Exchange) {
        if let Some(secret) = &self.secret {
            self.pairs.entry((peer, by)).or_insert_with(|| exchange.key_of_pair(secret));
        }
    }
}
