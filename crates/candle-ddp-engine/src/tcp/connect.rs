//! Establishes the first control connections between ranks of different hosts while a group is created. The others, and those
//! for data, are made at first use ([`reach`](crate::tcp::reach)).
use crate::construction::ABSENT;
use crate::error::Failure;
use crate::hosts::Hosts;
use crate::tcp::connector::Connector;
use crate::tcp::door::{Door, Event, Identity};
use crate::tcp::handshake::Kind;
use crate::tcp::keys::Keys;
use crate::tcp::meeting::Met;
use crate::{Error, Result};
use rustix::event::{Timespec, poll};
use rustix::io::Errno;
use std::net::TcpStream;
use std::time::Instant;

/// The connections of one rank to the ranks of other hosts.
pub(crate) struct Connections {
    /// For the monitors, non-blocking; by rank, `None` for those that are not [contacts](Hosts::contacts).
    pub(crate) control: Vec<Option<TcpStream>>,
    /// Where more are made; `None` if there are no other hosts.
    pub(crate) door: Option<Door>,
}

/// The reason why lower ranks are missing that this rank has called.
const UNANSWERED: &str = "they do not answer: their processes are stopped, or a firewall blocks the connections";

impl Connector<'_> {
    /// Connects to the ranks of other hosts.
    pub(crate) fn connect(&self, met: Met, hosts: &Hosts) -> Result<Connections> {
        let world_size = self.own.config.world_size;
        let contacts = hosts.contacts();
        let mut control: Vec<Option<TcpStream>> = (0..world_size).map(|_| None).collect();
        if hosts.count() == 1 {
            return Ok(Connections { control, door: None });
        }
        let mut addresses = self.addresses()?.into_iter().map(Some).collect::<Vec<_>>();
        hosts.members().iter().for_each(|member| addresses[*member] = None);
        let identity = Identity { own: self.own, nonce: met.nonce, keys: Keys::new(self.secret.clone()) };
        let mut door = Door::new(identity, met.listener, addresses);
        contacts.iter().filter(|peer| **peer < self.own.rank).for_each(|peer| door.call(*peer, Kind::Control));
        loop {
            self.construction.check()?;
            // A faster peer may already connect for data, and for control without being a contact.
            let is_for_later = |event: &Event| match event {
                Event::Connected { peer, kind, .. } => *kind != Kind::Control || !contacts.contains(peer),
                _ => false,
            };
            for event in door.events_but(is_for_later) {
                match event {
                    Event::Connected { peer, socket, .. } if control[peer].is_none() => control[peer] = Some(socket),
                    Event::Connected { peer, .. } => {
                        let reason = "two processes say that they are this rank: give each its own rank";
                        return Err(self.own.missing(&[peer], reason));
                    }
                    Event::Answered { .. } => {}
                    Event::Failed { error, .. } => return Err(self.construction.cause(error)),
                    Event::Gone { peer } => return Err(self.gone(peer)),
                    Event::Misfit { error } => return Err(error),
                }
            }
            let missing: Vec<usize> = contacts.iter().copied().filter(|peer| control[*peer].is_none()).collect();
            if missing.is_empty() {
                door.complete();
                return Ok(Connections { control, door: Some(door) });
            }
            if Instant::now() >= self.deadline {
                return Err(self.missing(&door, &missing));
            }
            let mut fds = Vec::new();
            let patience = door.prepare(&mut fds).map_or(self.slice(), |patience| patience.min(self.slice()));
            match poll(&mut fds, Timespec::try_from(patience).ok().as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(Error::io("waiting for connections", error)),
            }
            door.step()?;
        }
    }

    /// The error if ranks have not connected in time.
    fn missing(&self, door: &Door, missing: &[usize]) -> Error {
        let (higher, lower): (Vec<usize>, Vec<usize>) = missing.iter().partition(|peer| **peer > self.own.rank);
        // A rank that waits for another one has called, and proves its identity afterwards.
        let (called, absent): (Vec<usize>, Vec<usize>) = higher.iter().partition(|peer| door.is_caller(**peer));
        let strangers = door.strangers();
        // Lower ranks may not answer because they wait for a higher one too.
        match (absent.is_empty(), lower.is_empty()) {
            (false, _) => {
                self.own.missing(&absent, format!("they have not connected to this rank. {ABSENT}{strangers}"))
            }
            (true, false) => self.own.missing(&lower, UNANSWERED),
            (true, true) => self.own.missing(&called, "they have connected to this rank, but wait for others"),
        }
    }

    /// The error of a peer whose connection has closed, or its root cause.
    fn gone(&self, peer: usize) -> Error {
        let call = "the construction of the group".to_string();
        self.construction.cause(Failure::PeerGone { rank: self.own.rank, peer, call }.into())
    }
}
