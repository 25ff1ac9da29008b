//! Establishes the connections between ranks of different hosts, whose addresses are in their [cards](super::meeting).
//!
//! Of two ranks, the higher one connects to the lower one, and both identify themselves and prove their identity
//! ([handshake](super::handshake)). Data is read in the order of arrival, so no two ranks wait for each other, and a refusal
//! is noticed at once.
//!
//! With a secret, a caller that has not proved that it knows it changes nothing: it is refused, whatever it says.
use super::accept::{Acceptor, Conversation, Heard, Stage};
use super::connector::{ABSENT, Connector};
use super::handshake::{
    End, Exchange, GREETING, Greeting, Handshake, HandshakeError, Kind, REPLY, SAME_SECRET, greeting,
};
use super::hosts::Hosts;
use super::keepalive::{give_up_after, keep_alive};
use super::meeting::Met;
use crate::error::Failure;
use crate::error::{SHORTAGE_HINT, is_shortage};
use crate::rendezvous;
use crate::rendezvous::secret::PROOF;
use crate::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::io::{ErrorKind, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// The connections of one rank, non-blocking; by rank, `None` for itself.
pub(super) struct Connections {
    pub(super) data: Vec<Option<TcpStream>>,
    pub(super) direct: Vec<Option<TcpStream>>,
    pub(super) control: Vec<Option<TcpStream>>,
}

/// Why lower ranks are missing that this rank has called.
const UNANSWERED: &str = "they do not answer: their processes are stopped, or a firewall blocks the connections";

/// The three connections to a peer.
type Slots = [Option<TcpStream>; Kind::ALL.len()];

impl Connector<'_> {
    /// Connects to the ranks of other hosts.
    pub(super) fn connect(&self, met: &Met, hosts: &Hosts) -> Result<Connections> {
        let nonce = met.nonce;
        let lower: Vec<usize> = (0..self.rank).filter(|peer| hosts.member(*peer).is_none()).collect();
        let mut conversations = Vec::new();
        for (peer, address) in lower.iter().zip(self.addresses(&lower)?) {
            for kind in Kind::ALL {
                conversations.push(self.greet(*peer, address, nonce, kind)?);
            }
        }
        let slots = self.converse(&met.listener, hosts, nonce, conversations)?;
        let mut connections = Connections { data: vec![], direct: vec![], control: vec![] };
        for (peer, slots) in slots.into_iter().enumerate() {
            for socket in slots.iter().flatten() {
                socket
                    .set_nodelay(true)
                    .map_err(|error| self.failed(&[peer], format!("preparing the connection: {error}")))?;
            }
            slots.iter().flatten().for_each(|socket| keep_alive(socket, self.lost_after));
            let [data, direct, control] = slots;
            if let Some(control) = &control {
                give_up_after(control, self.lost_after);
            }
            connections.data.push(data);
            connections.direct.push(direct);
            connections.control.push(control);
        }
        Ok(connections)
    }

    /// The error of a peer whose connection has closed, or its root cause.
    pub(super) fn gone(&self, peer: usize) -> Error {
        let call = "the construction of the group".to_string();
        self.construction.cause(Failure::PeerGone { rank: self.rank, peer, call }.into())
    }

    /// Connects to `peer` and sends a separate greeting for this connection.
    fn greet(&self, peer: usize, address: SocketAddr, nonce: u64, kind: Kind) -> Result<Conversation> {
        let handshake = self.handshake(nonce, kind);
        let sent = greeting(&handshake)?;
        let socket = self.call(peer, address, &sent)?;
        let stage = Stage::Reply { expected: Handshake { rank: peer, ..handshake }, sent };
        Ok(Conversation::new(socket, address, stage))
    }

    /// Sends the greeting again to a peer that closed the connection before it replied: it may have had no room for one
    /// more caller. Otherwise it is gone. Without a secret, it has room for every greeting that comes at once, so few
    /// attempts suffice.
    fn greet_again(&self, before: &Conversation, peer: &Handshake, nonce: u64) -> Result<Conversation> {
        const PAUSE: Duration = Duration::from_millis(20);
        const ATTEMPTS: u32 = 5;
        if self.secret.is_none() && before.attempts >= ATTEMPTS {
            return Err(self.gone(peer.rank));
        }
        std::thread::sleep(PAUSE);
        let mut again = self.greet(peer.rank, before.address, nonce, peer.kind).map_err(|_| self.gone(peer.rank))?;
        again.attempts = before.attempts + 1;
        Ok(again)
    }

    /// Connects to `peer` and sends the greeting.
    fn call(&self, peer: usize, address: SocketAddr, greeting: &Greeting) -> Result<TcpStream> {
        const PAUSE: Duration = Duration::from_millis(100);
        let failed = |error: std::io::Error| {
            let reason = format!("connecting to {address}: {error}. Is that address reachable from this host?");
            self.construction.cause(self.failed(&[peer], reason))
        };
        let mut is_warned = false;
        let mut socket = loop {
            self.construction.check()?;
            match TcpStream::connect_timeout(&address, self.slice()) {
                Ok(socket) => break socket,
                Err(error) if Instant::now() >= self.deadline => return Err(failed(error)),
                // Packets may be lost, or the peer may have more callers than it can accept at once.
                Err(error) if error.kind() == ErrorKind::TimedOut => {}
                Err(error) if is_shortage(&error) => {
                    if !std::mem::replace(&mut is_warned, true) {
                        let rank = self.rank;
                        log::warn!("rank {rank} cannot connect for now, and tries again: {error} ({SHORTAGE_HINT})");
                    }
                    std::thread::sleep(PAUSE);
                }
                Err(error) => return Err(failed(error)),
            }
        };
        socket.write_all(greeting).and_then(|()| socket.set_nonblocking(true)).map_err(failed)?;
        Ok(socket)
    }

    /// Accepts connections and reads handshakes and replies until there is a connection of each kind with each rank of
    /// another host.
    fn converse(
        &self,
        listener: &TcpListener,
        hosts: &Hosts,
        nonce: u64,
        mut conversations: Vec<Conversation>,
    ) -> Result<Vec<Slots>> {
        let mut slots: Vec<Slots> = (0..self.config.world_size).map(|_| Slots::default()).collect();
        let mut acceptor = Acceptor::new(listener, self.rank);
        loop {
            self.construction.check()?;
            let missing: Vec<usize> = (0..slots.len())
                .filter(|peer| hosts.member(*peer).is_none() && slots[*peer].iter().any(Option::is_none))
                .collect();
            if missing.is_empty() {
                return Ok(slots);
            }
            let left = self.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let (higher, lower): (Vec<usize>, Vec<usize>) = missing.iter().partition(|peer| **peer > self.rank);
                // A rank that waits for another one has called, and proves its identity afterwards.
                let called = |peer: &usize| conversations.iter().any(|other| other.is_caller(*peer));
                let (called, absent): (Vec<usize>, Vec<usize>) = higher.iter().partition(|peer| called(peer));
                let strangers = acceptor.strangers();
                // Lower ranks may not answer because they wait for a higher one too.
                return Err(match (absent.is_empty(), lower.is_empty()) {
                    (false, _) => {
                        self.failed(&absent, format!("they have not connected to this rank. {ABSENT}{strangers}"))
                    }
                    (true, false) => self.failed(&lower, UNANSWERED),
                    (true, true) => self.failed(&called, "they have connected to this rank, but wait for others"),
                });
            }
            let listening = acceptor.prepare(&mut conversations);
            let mut fds: Vec<_> = listening.iter().map(|listener| PollFd::new(*listener, PollFlags::IN)).collect();
            fds.extend(conversations.iter().map(|conversation| PollFd::new(&conversation.socket, PollFlags::IN)));
            let patience = self.slice().min(acceptor.patience(&conversations));
            match poll(&mut fds, Timespec::try_from(patience).ok().as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(Error::io("waiting for connections", error)),
            }
            drop(fds);
            let mut waiting = Vec::with_capacity(conversations.len());
            for mut conversation in conversations {
                match (conversation.read(), &conversation.stage) {
                    (Heard::Nothing, _) => waiting.push(conversation),
                    (Heard::All, Stage::Greeting) => {
                        self.welcome(conversation, nonce, &mut slots, &mut acceptor, &mut waiting)?;
                    }
                    (Heard::All, Stage::Proof { caller, exchange }) => {
                        let is_proved =
                            self.secret.as_ref().is_some_and(|s| exchange.verify(s, End::Caller, conversation.heard()));
                        if is_proved {
                            let caller = *caller;
                            self.take(conversation, &caller, &mut slots)?;
                        } else {
                            acceptor.refuse_unproved(conversation.address, caller.rank);
                        }
                    }
                    (Heard::All, Stage::Reply { expected, sent }) => {
                        if self.check_reply(&conversation, expected, sent)? {
                            slots[expected.rank][expected.kind as usize] = Some(conversation.socket);
                        } else {
                            waiting.push(self.greet_again(&conversation, expected, nonce)?);
                        }
                    }
                    (Heard::Closed, Stage::Greeting) => {}
                    (Heard::Closed, Stage::Proof { caller, .. }) => {
                        acceptor.refuse_unproved(conversation.address, caller.rank);
                    }
                    (Heard::Closed, Stage::Reply { expected, .. }) => {
                        waiting.push(self.greet_again(&conversation, expected, nonce)?);
                    }
                }
            }
            conversations = waiting;
            if listening.is_some() {
                acceptor.accept(&mut conversations)?;
            }
        }
    }

    /// Checks a caller's greeting and answers it. Callers from outside the group are refused. Without a secret, this
    /// makes the caller a peer; one with a different configuration is an error here and, through the reply, on that
    /// peer too. With a secret, the connection joins those in `waiting`, for the proof, if there is room for one more.
    fn welcome(
        &self,
        caller: Conversation,
        nonce: u64,
        slots: &mut [Slots],
        acceptor: &mut Acceptor,
        waiting: &mut Vec<Conversation>,
    ) -> Result<()> {
        let address = caller.address;
        let (handshake, greeted) = match Handshake::decode(caller.heard()) {
            Ok(handshake) if handshake.nonce == nonce => match Greeting::try_from(caller.heard()) {
                Ok(greeted) => (handshake, greeted),
                Err(_) => return Ok(()),
            },
            Ok(handshake) => {
                acceptor.refuse(address, format_args!("it belongs to another group (as its rank {})", handshake.rank));
                return Ok(());
            }
            Err(error) => {
                acceptor.refuse(address, error.describe());
                if let HandshakeError::Version(_) = error {
                    // The caller should learn why, but this rank does not wait for it.
                    let _ = (&caller.socket).write(&self.handshake(nonce, Kind::Control).encode());
                }
                return Ok(());
            }
        };
        let exchange = Exchange { caller: greeted, callee: greeting(&self.handshake(nonce, handshake.kind))? };
        let mut reply = [0; REPLY];
        reply[..GREETING].copy_from_slice(&exchange.callee);
        if let Some(secret) = &self.secret {
            let limit = 2 * Kind::ALL.len() * slots.len();
            if !handshake.config.secret || !acceptor.make_room(waiting, limit) {
                acceptor.refuse_unproved(address, handshake.rank);
                return Ok(());
            }
            reply[GREETING..].copy_from_slice(&exchange.prove(secret, End::Callee));
        }
        // A socket's empty buffer takes these few bytes at once.
        let replied = matches!((&caller.socket).write(&reply), Ok(REPLY));
        if self.secret.is_some() {
            waiting.extend(replied.then(|| caller.await_proof(handshake, exchange)));
            return Ok(());
        }
        if let Some(difference) = handshake.config.difference(&self.config) {
            return Err(self.failed(&[handshake.rank], difference));
        }
        if !replied {
            return Err(self.gone(handshake.rank));
        }
        self.take(caller, &handshake, slots)
    }

    /// Takes the connection of a peer.
    fn take(&self, caller: Conversation, handshake: &Handshake, slots: &mut [Slots]) -> Result<()> {
        if let Some(difference) = handshake.config.difference(&self.config) {
            return Err(self.failed(&[handshake.rank], difference));
        }
        let slot = slots
            .get_mut(handshake.rank)
            .filter(|_| handshake.rank > self.rank)
            .map(|slots| &mut slots[handshake.kind as usize]);
        match slot {
            Some(slot @ None) => {
                *slot = Some(caller.socket);
                Ok(())
            }
            Some(Some(_)) => Err(self.failed(
                &[handshake.rank],
                format!(
                    "two processes say that they are this rank, one of them at {}: give each its own rank",
                    caller.address
                ),
            )),
            None => Err(self.failed(&[handshake.rank], "it connected to a rank that is not below it")),
        }
    }

    /// Checks the reply of a lower rank to `sent`, and proves that this rank knows the secret too. Returns false if the
    /// peer has replied and no longer waits for the proof.
    fn check_reply(&self, conversation: &Conversation, expected: &Handshake, sent: &Greeting) -> Result<bool> {
        let (address, reply) = (conversation.address, conversation.heard());
        let reason = match Handshake::decode(reply) {
            Ok(handshake) if handshake == *expected => {
                let Some(secret) = &self.secret else { return Ok(true) };
                let proved = reply.split_first_chunk::<GREETING>().and_then(|(callee, proof)| {
                    let exchange = Exchange { caller: *sent, callee: *callee };
                    exchange.verify(secret, End::Callee, proof).then_some(exchange)
                });
                let Some(exchange) = proved else {
                    return Err(rendezvous::Error::Secret {
                        operation: format!("connecting rank {}", self.rank),
                        peer: format!("rank {} at {address}", expected.rank),
                        reason: format!("it has another secret than this rank: {SAME_SECRET}"),
                    }
                    .into());
                };
                let proof = exchange.prove(secret, End::Caller);
                return Ok(!conversation.is_closed() && matches!((&conversation.socket).write(&proof), Ok(PROOF)));
            }
            Ok(handshake) => handshake
                .config
                .difference(&self.config)
                .unwrap_or_else(|| format!("rank {} of another group answers at its address", handshake.rank)),
            Err(error) => error.describe(),
        };
        Err(self.failed(&[expected.rank], reason))
    }
}
