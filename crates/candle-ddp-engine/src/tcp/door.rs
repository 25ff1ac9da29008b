//! The door of a rank: it takes the calls of ranks on other hosts and calls them, while a group is created and later. Nothing
//! here waits.
//!
//! Of two ranks, the higher one calls the lower one; only for control, either calls. A call is over once both sides have
//! identified themselves and proved their identity ([handshake](crate::tcp::handshake)). Data is read in the order of arrival, so no
//! two ranks wait for each other, and a refusal is noticed at once.
//!
//! With a secret, a caller that has not proved that it knows the key changes nothing: it is refused, whatever it says. The secret
//! itself proves a pair's control connection, which comes first; the key that it gives the pair proves the others.
use crate::rendezvous::secret::PROOF;
use crate::tcp::accept::{self, Acceptor, Call, Conversation, Heard, Stage};
use crate::tcp::connector::Own;
use crate::tcp::handshake::{By, End, Exchange, GREETING, Greeting, Handshake, Kind, REPLY, SAME_SECRET, greeting};
use crate::tcp::keepalive::{give_up_after, keep_alive};
use crate::tcp::keys::Keys;
use crate::{Error, Result};
use candle_ddp_base::descriptors::{SHORTAGE_HINT, is_shortage};
use rustix::event::{PollFd, PollFlags};
use std::fmt::Arguments;
use std::io::{ErrorKind, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

#[cfg(test)]
mod tests;

/// One rank's door.
pub(crate) struct Door {
    identity: Identity,
    /// The addresses of the ranks of other hosts, by rank; `None` for ranks of this host.
    addresses: Vec<Option<SocketAddr>>,
    acceptor: Acceptor,
    conversations: Vec<Conversation>,
    /// Calls to make, and when.
    later: Vec<(Instant, Call)>,
    /// Calls to make as soon as there is a key of that pair.
    keyless: Vec<Call>,
    events: Vec<Event>,
    /// Whether a peer whose system refuses a connection has been there before.
    is_complete: bool,
}

/// Who a rank is to its peers.
pub(crate) struct Identity {
    pub(crate) own: Own,
    pub(crate) nonce: u64,
    pub(crate) keys: Keys,
}

/// An event at the door.
pub(crate) enum Event {
    /// There is a connection, non-blocking. `is_own` if this rank called.
    Connected { peer: usize, kind: Kind, socket: TcpStream, is_own: bool },
    /// A peer's system has accepted this rank's call; the peer itself may not have noticed.
    Answered { peer: usize },
    /// This rank cannot connect to a peer.
    Failed { peer: usize, error: Error },
    /// A peer takes no calls any more, or has closed its end of a new connection.
    Gone { peer: usize },
    /// A caller with the right nonce cannot belong to this group.
    Misfit { error: Error },
}

/// How long the system may take to connect before it is asked again: it repeats lost packets at growing intervals.
const CONNECT_TIME: Duration = Duration::from_secs(2);
/// The pause before a peer is called again that closed the connection before it replied.
const PAUSE: Duration = Duration::from_millis(20);
/// Without a secret, a peer has room for every greeting that comes at once, so few attempts suffice.
const ATTEMPTS: u32 = 5;

impl Door {
    pub(crate) fn new(identity: Identity, listener: TcpListener, addresses: Vec<Option<SocketAddr>>) -> Self {
        let acceptor = Acceptor::new(listener, identity.own.rank);
        Self {
            identity,
            addresses,
            acceptor,
            conversations: vec![],
            later: vec![],
            keyless: vec![],
            events: vec![],
            is_complete: false,
        }
    }

    /// Calls `peer` for a connection of this kind, unless it is being called for it.
    pub(crate) fn call(&mut self, peer: usize, kind: Kind) {
        let is_same = |call: &Call| (call.peer, call.kind) == (peer, kind);
        let called = self.conversations.iter().filter_map(Conversation::call);
        if called.chain(self.later.iter().map(|(_, call)| call)).chain(&self.keyless).any(is_same) {
            return;
        }
        let call = Call { peer, kind, attempts: 0, short_since: None };
        match self.identity.keys.suffice(peer, kind) {
            true => self.dial(call),
            false => self.keyless.push(call),
        }
    }

    /// From here on, all ranks listen: one whose system refuses a connection has left or ended.
    pub(crate) fn complete(&mut self) {
        self.is_complete = true;
    }

    /// Takes all that has happened.
    pub(crate) fn events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// Takes what has happened, but for the events that are to be taken `later`.
    pub(crate) fn events_but(&mut self, later: impl Fn(&Event) -> bool) -> Vec<Event> {
        let (kept, taken) = self.events().into_iter().partition(later);
        self.events = kept;
        taken
    }

    /// Whether the other end of a conversation may take it for a connection already.
    pub(crate) fn is_connecting(&self) -> bool {
        self.conversations.iter().any(|other| matches!(other.stage, Stage::Reply { .. } | Stage::Proof { .. }))
    }

    /// Whether `peer` has called, and must still prove that it knows the secret.
    pub(crate) fn is_caller(&self, peer: usize) -> bool {
        self.conversations.iter().any(|other| other.is_caller(peer))
    }

    /// Warns of what any caller can cause.
    pub(crate) fn warn(&mut self, warning: Arguments<'_>) {
        self.acceptor.warnings.warn(warning);
    }

    /// Describes the last caller that did not prove that it knows the secret, for an error.
    pub(crate) fn strangers(&self) -> String {
        self.acceptor.strangers()
    }

    /// Adds the descriptors to wait for before the next [`step`](Self::step). Returns how long to wait for them at most;
    /// `None` without a limit.
    pub(crate) fn prepare<'a>(&'a self, fds: &mut Vec<PollFd<'a>>) -> Option<Duration> {
        fds.extend(self.acceptor.listening().map(|listener| PollFd::new(listener, PollFlags::IN)));
        fds.extend(self.conversations.iter().map(|other| {
            let flags = if let Stage::Connecting { .. } = other.stage { PollFlags::OUT } else { PollFlags::IN };
            PollFd::new(&other.socket, flags)
        }));
        let now = Instant::now();
        let next = self.later.iter().map(|(at, _)| at.saturating_duration_since(now));
        next.chain(self.acceptor.patience(&self.conversations)).min()
    }

    /// Does all that can be done without waiting.
    pub(crate) fn step(&mut self) -> Result<()> {
        let now = Instant::now();
        let due: Vec<(Instant, Call)> = self.later.extract_if(.., |(at, _)| *at <= now).collect();
        due.into_iter().for_each(|(_, call)| self.dial(call));
        for mut conversation in std::mem::take(&mut self.conversations) {
            if let Stage::Connecting { .. } = conversation.stage {
                self.connect(conversation);
                continue;
            }
            match (conversation.read(), &conversation.stage) {
                (Heard::Nothing, _) => self.conversations.push(conversation),
                (Heard::All, Stage::Greeting) => self.welcome(conversation)?,
                (Heard::All, Stage::Proof { caller, exchange }) => {
                    let (caller, exchange, proof) = (*caller, *exchange, conversation.heard());
                    let key = self.identity.keys.get(caller.rank, &caller);
                    match key.is_some_and(|key| exchange.verify(key, End::Caller, proof)) {
                        true => self.take(conversation, caller, &exchange),
                        false => self.acceptor.refuse_unproved(conversation.address, caller.rank),
                    }
                }
                (Heard::All, Stage::Reply { call, expected, sent }) => {
                    let call = *call;
                    match self.check_reply(&conversation, expected, sent) {
                        Ok(Some(exchange)) => {
                            self.connected(call.peer, call.kind, conversation.socket, true, &exchange)
                        }
                        Ok(None) => self.call_again(call),
                        Err(error) => self.events.push(Event::Failed { peer: call.peer, error }),
                    }
                }
                (Heard::Closed, Stage::Greeting | Stage::Connecting { .. })
                | (Heard::All, Stage::Connecting { .. }) => {}
                (Heard::Closed, Stage::Proof { caller, .. }) => {
                    self.acceptor.refuse_unproved(conversation.address, caller.rank);
                }
                (Heard::Closed, Stage::Reply { call, .. }) => self.call_again(*call),
            }
        }
        // All that has arrived has been read: this rank itself may have been stopped for a while.
        self.acceptor.tidy(&mut self.conversations, self.addresses.len(), self.is_complete);
        self.acceptor.accept(&mut self.conversations)
    }

    /// Begins to connect to a peer.
    fn dial(&mut self, call: Call) {
        let Some(address) = self.addresses.get(call.peer).copied().flatten() else {
            let reason = "its address is unknown, although it is on another host: this is a bug of candle-ddp";
            let error = self.identity.own.missing(&[call.peer], reason);
            return self.events.push(Event::Failed { peer: call.peer, error });
        };
        match begin_to_connect(address) {
            Ok(socket) => {
                let stage = Stage::Connecting { call: Call { short_since: None, ..call } };
                self.conversations.push(Conversation::new(socket, address, stage));
            }
            Err(error) => self.not_connected(call, address, &error),
        }
    }

    /// Continues with a connection once the system has made it.
    fn connect(&mut self, conversation: Conversation) {
        let Stage::Connecting { call } = conversation.stage else { return };
        let (address, socket) = (conversation.address, &conversation.socket);
        match (socket.peer_addr(), socket.take_error()) {
            (_, Ok(Some(error)) | Err(error)) => self.not_connected(call, address, &error),
            (Err(_), Ok(None)) if conversation.since.elapsed() < CONNECT_TIME => self.conversations.push(conversation),
            // Packets may be lost, or the peer may have more callers than it can accept at once.
            (Err(_), Ok(None)) => self.dial(call),
            (Ok(_), Ok(None)) => match self.greet(socket, call) {
                Ok(stage) => {
                    self.events.push(Event::Answered { peer: call.peer });
                    self.conversations.push(Conversation::new(conversation.socket, address, stage));
                }
                Err(error) => self.events.push(Event::Failed { peer: call.peer, error }),
            },
        }
    }

    /// Tries again, if the reason may pass.
    fn not_connected(&mut self, call: Call, address: SocketAddr, error: &std::io::Error) {
        let (peer, now) = (call.peer, Instant::now());
        let short_since = call.short_since.unwrap_or(now);
        if error.kind() == ErrorKind::TimedOut {
            self.later.push((now + PAUSE, call));
        } else if is_shortage(error) && short_since.elapsed() < accept::SHORTAGE_TIME {
            self.acceptor.warn_of_shortage("connect", error);
            self.later.push((now + accept::PAUSE, Call { short_since: Some(short_since), ..call }));
        } else {
            let hint = match is_shortage(error) {
                true => SHORTAGE_HINT,
                false => "Is that address reachable from this host?",
            };
            self.events.push(match call.attempts {
                0 if !self.is_complete || error.kind() != ErrorKind::ConnectionRefused => {
                    let error = self.identity.own.missing(&[peer], format!("connecting to {address}: {error}. {hint}"));
                    Event::Failed { peer, error }
                }
                _ => Event::Gone { peer },
            });
        }
    }

    /// Calls a peer again that closed the connection before it replied: it may have had no room for one more caller.
    /// Otherwise it is gone.
    fn call_again(&mut self, call: Call) {
        if self.identity.keys.secret.is_none() && call.attempts >= ATTEMPTS {
            return self.events.push(Event::Gone { peer: call.peer });
        }
        self.later.push((Instant::now() + PAUSE, Call { attempts: call.attempts + 1, ..call }));
    }

    /// Checks a caller's greeting and answers it. Callers from outside the group are refused. Without a secret, this
    /// makes the caller a peer; one with a different configuration is told so by the reply. With a secret, the connection
    /// waits for the proof. A peer whose proof of the control connection is still on its way calls again for the others.
    fn welcome(&mut self, caller: Conversation) -> Result<()> {
        let (address, identity) = (caller.address, &self.identity);
        let (handshake, greeted) = match Handshake::decode(caller.heard()) {
            Ok(handshake) if handshake.nonce == identity.nonce => match Greeting::try_from(caller.heard()) {
                Ok(greeted) => (handshake, greeted),
                Err(_) => return Ok(()),
            },
            Ok(handshake) => {
                let reason = format_args!("it belongs to another group (as its rank {})", handshake.rank);
                self.acceptor.refuse(address, reason);
                return Ok(());
            }
            // It gets no answer: it may be anybody. Ranks of different versions notice it by their cards.
            Err(error) => {
                self.acceptor.refuse(address, error.describe());
                return Ok(());
            }
        };
        let own = identity.own.handshake(identity.nonce, handshake.kind, handshake.control);
        let exchange = Exchange { caller: greeted, callee: greeting(&own)? };
        let mut reply = [0; REPLY];
        reply[..GREETING].copy_from_slice(&exchange.callee);
        if identity.keys.secret.is_some() {
            if !handshake.config.secret || handshake.rank >= self.addresses.len() {
                self.acceptor.refuse_unproved(address, handshake.rank);
                return Ok(());
            }
            let Some(key) = identity.keys.get(handshake.rank, &handshake) else {
                log::debug!(
                    "rank {}: rank {} calls before it has proved itself",
                    self.identity.own.rank,
                    handshake.rank
                );
                return Ok(());
            };
            reply[GREETING..].copy_from_slice(&exchange.prove(key, End::Callee));
        }
        // A socket's empty buffer takes these few bytes at once.
        let replied = matches!((&caller.socket).write(&reply), Ok(REPLY));
        if identity.keys.secret.is_some() {
            self.conversations.extend(replied.then(|| caller.await_proof(handshake, exchange)));
        } else if replied {
            self.take(caller, handshake, &exchange);
        } else {
            self.events.push(Event::Gone { peer: handshake.rank });
        }
        Ok(())
    }

    /// Takes the connection of a peer.
    fn take(&mut self, caller: Conversation, handshake: Handshake, exchange: &Exchange) {
        let (peer, kind, own) = (handshake.rank, handshake.kind, self.identity.own.rank);
        let is_elsewhere = self.addresses.get(peer).is_some_and(Option::is_some);
        let misfit = if let Some(difference) = handshake.config.difference(&self.identity.own.config) {
            difference
        } else if !is_elsewhere || (peer < own && kind != Kind::Control) {
            "it connected to a rank that is not below it".to_string()
        } else {
            return self.connected(peer, kind, caller.socket, false, exchange);
        };
        let error = self.identity.own.missing(&[peer], misfit);
        self.events.push(Event::Misfit { error });
    }

    /// Prepares a new connection. One for control gives the pair a key, for which calls may wait.
    fn connected(&mut self, peer: usize, kind: Kind, socket: TcpStream, is_own: bool, exchange: &Exchange) {
        let lost_after = self.identity.own.lost_after;
        if let Err(error) = socket.set_nodelay(true) {
            let error = self.identity.own.missing(&[peer], format!("preparing the connection: {error}"));
            return self.events.push(Event::Failed { peer, error });
        }
        keep_alive(&socket, lost_after);
        if kind == Kind::Control {
            give_up_after(&socket, lost_after);
        }
        self.events.push(Event::Connected { peer, kind, socket, is_own });
        if kind == Kind::Control {
            let (caller, callee) = if is_own { (self.identity.own.rank, peer) } else { (peer, self.identity.own.rank) };
            self.identity.keys.add(peer, By::new(caller, callee), exchange);
            let ready: Vec<Call> = self.keyless.extract_if(.., |call| call.peer == peer).collect();
            ready.into_iter().for_each(|call| self.dial(call));
        }
    }

    /// Sends a greeting on a new connection.
    fn greet(&self, socket: &TcpStream, call: Call) -> Result<Stage> {
        // Without a secret, and for control, there is none.
        let control = self.identity.keys.control_of(call.peer).unwrap_or(By::Higher);
        let own = self.identity.own.handshake(self.identity.nonce, call.kind, control);
        let sent = greeting(&own)?;
        // A socket's empty buffer takes these few bytes at once; a peer that has closed it is called again.
        let _ = (&mut &*socket).write(&sent);
        Ok(Stage::Reply { call, expected: Handshake { rank: call.peer, ..own }, sent })
    }

    /// Checks a peer's reply to `sent`, and proves that this rank knows the key too. Returns `None` if the peer has
    /// replied and no longer waits for the proof.
    fn check_reply(
        &self,
        conversation: &Conversation,
        expected: &Handshake,
        sent: &Greeting,
    ) -> Result<Option<Exchange>> {
        let (identity, address, reply) = (&self.identity, conversation.address, conversation.heard());
        let reason = match (Handshake::decode(reply), reply.split_first_chunk::<GREETING>()) {
            (Ok(handshake), Some((callee, proof))) if handshake == *expected => {
                let exchange = Exchange { caller: *sent, callee: *callee };
                if identity.keys.secret.is_none() {
                    return Ok(Some(exchange));
                }
                let key = identity.keys.get(expected.rank, expected);
                let Some(key) = key.filter(|key| exchange.verify(key, End::Callee, proof)) else {
                    return Err(identity.not_proved(expected, address));
                };
                let proof = exchange.prove(key, End::Caller);
                let is_sent = !conversation.is_closed() && matches!((&conversation.socket).write(&proof), Ok(PROOF));
                return Ok(is_sent.then_some(exchange));
            }
            (Ok(handshake), _) => handshake
                .config
                .difference(&identity.own.config)
                .unwrap_or_else(|| format!("rank {} of another group answers at its address", handshake.rank)),
            (Err(error), _) => error.describe(),
        };
        Err(identity.own.missing(&[expected.rank], reason))
    }
}

impl Identity {
    /// The error if the reply at `address` is not by `peer`, as the proof shows.
    fn not_proved(&self, peer: &Handshake, address: SocketAddr) -> Error {
        match peer.kind {
            Kind::Control => Error::Secret {
                operation: format!("connecting rank {}", self.own.rank),
                peer: format!("rank {} at {address}", peer.rank),
                reason: format!("it has another secret than this rank: {SAME_SECRET}"),
            },
            Kind::Data | Kind::Direct => {
                let reason = format!("another process than the one that this rank has met answers at {address}");
                self.own.missing(&[peer.rank], reason)
            }
        }
    }
}

/// Begins to connect a new socket, which is non-blocking.
fn begin_to_connect(address: SocketAddr) -> std::io::Result<TcpStream> {
    use rustix::io::Errno;
    use rustix::net::{AddressFamily, SocketType, connect, ipproto};
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    #[cfg(not(target_vendor = "apple"))]
    let new = {
        use rustix::net::{SocketFlags, socket_with};
        socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, Some(ipproto::TCP))
    };
    #[cfg(target_vendor = "apple")]
    let new = rustix::net::socket(family, SocketType::STREAM, Some(ipproto::TCP)).and_then(|new| {
        rustix::io::fcntl_setfd(&new, rustix::io::FdFlags::CLOEXEC)?;
        rustix::io::ioctl_fionbio(&new, true)?;
        Ok(new)
    });
    let new = new?;
    match connect(&new, &address) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(new.into()),
        Err(error) => Err(error.into()),
    }
}
