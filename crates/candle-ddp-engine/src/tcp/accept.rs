//! Accepts connections. A peer sends its greeting at once; other programs that find the port cannot keep peers out.
use crate::rendezvous::secret::PROOF;
use crate::tcp::handshake::{Exchange, GREETING, Greeting, Handshake, Kind, REPLY, SAME_SECRET};
use crate::warnings::Warnings;
use crate::{Error, Result};
use candle_ddp_base::descriptors::{SHORTAGE_HINT, is_shortage};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::fmt::Display;
use std::io::{ErrorKind, Read};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// How long a caller has to send its greeting, and then to prove that it has the secret. A peer proves it at once, except
/// while it waits for other ranks: so while the group is created, a caller may take longer for its proof.
const HANDSHAKE_TIME: Duration = Duration::from_secs(3);
/// The number of callers that may be silent at a time. The oldest of them gives way to another one.
const SILENT: usize = 512;
/// The number of callers that may have sent a greeting and no proof at a time. In a large group, it is so many for each rank.
const UNPROVED: usize = 128;
const CALLERS: usize = 2 * Kind::ALL.len();
/// The number of connections that are accepted before the others get their turn.
const ACCEPTED: usize = 1024;
/// The pause after the system ran out of resources for a connection, and how long such a lack may last.
pub(crate) const PAUSE: Duration = Duration::from_millis(100);
pub(crate) const SHORTAGE_TIME: Duration = Duration::from_secs(3);

/// The listening side of one rank.
pub(crate) struct Acceptor {
    listener: TcpListener,
    rank: usize,
    paused_until: Option<Instant>,
    /// Since when the system has had no resources for a caller.
    short_since: Option<Instant>,
    /// The last caller that did not prove that it knows the secret, and the rank that it claimed.
    unproved: Option<(SocketAddr, usize)>,
    pub(crate) warnings: Warnings,
}

impl Acceptor {
    pub(crate) fn new(listener: TcpListener, rank: usize) -> Self {
        Self {
            listener,
            rank,
            paused_until: None,
            short_since: None,
            unproved: None,
            warnings: Warnings::new(format!("rank {rank}")),
        }
    }

    /// Closes connections that have been silent for too long, and callers that have not proved that they know the secret, if
    /// they have had their time for it or are too many in a group of so many ranks. Of these, the first one that claims the most
    /// claimed rank gives way to the next: a peer proves itself within a round trip, and nobody takes the places of those that
    /// claim another rank. A peer that was closed calls again.
    pub(crate) fn tidy(&mut self, conversations: &mut Vec<Conversation>, ranks: usize, is_complete: bool) {
        let now = Instant::now();
        let is_late = |other: &mut Conversation| {
            let is_timed = other.is_silent() || is_complete && other.claim().is_some();
            is_timed && now.duration_since(other.since) >= HANDSHAKE_TIME
        };
        for Conversation { address, stage, .. } in conversations.extract_if(.., is_late) {
            match stage {
                Stage::Proof { caller, .. } => self.refuse_unproved(address, caller.rank),
                _ => {
                    let (rank, reason) = (self.rank, "which did not identify itself");
                    self.warnings.warn(format_args!("rank {rank} closed the connection of {address}, {reason}"));
                }
            }
        }
        let unproved = conversations.iter().filter_map(Conversation::claim).count();
        let excess = unproved.saturating_sub(UNPROVED.max(CALLERS * ranks));
        for _ in 0..excess {
            self.close_unproved(conversations);
        }
        self.paused_until = self.paused_until.filter(|until| now < *until);
    }

    /// The listener, unless accepting is paused.
    pub(crate) fn listening(&self) -> Option<&TcpListener> {
        self.paused_until.is_none().then_some(&self.listener)
    }

    /// How long to wait for the existing connections at most; `None` without a limit.
    pub(crate) fn patience(&self, conversations: &[Conversation]) -> Option<Duration> {
        // A connection whose greeting was read while others were accepted receives no more bytes.
        if conversations.iter().any(|other| other.read == other.awaited()) {
            return Some(Duration::ZERO);
        }
        (self.paused_until.is_some() || !conversations.is_empty()).then_some(PAUSE)
    }

    /// Accepts the waiting connections, up to [`ACCEPTED`]. However many strangers call, a peer's call is among the
    /// next ones: those that have been silent the longest give way.
    pub(crate) fn accept(&mut self, conversations: &mut Vec<Conversation>) -> Result<()> {
        // Without resources, the system refuses to accept even if nobody calls.
        if self.paused_until.is_some() || !is_ringing(&self.listener) {
            return Ok(());
        }
        let mut silent = silent(conversations);
        for _ in 0..ACCEPTED {
            match self.listener.accept() {
                Ok((socket, address)) => {
                    self.short_since = None;
                    if socket.set_nonblocking(true).is_ok() {
                        conversations.push(Conversation::new(socket, address, Stage::Greeting));
                        silent += 1;
                    }
                    while silent > SILENT && self.close_oldest(conversations) {
                        silent -= 1;
                    }
                }
                // One connection fewer, and there may be room for the next.
                Err(error) if is_shortage(&error) && silent > 0 && self.close_oldest(conversations) => silent -= 1,
                Err(error) if is_shortage(&error) && self.close_unproved(conversations) => {}
                Err(error) if is_shortage(&error) => {
                    if self.short_since.get_or_insert_with(Instant::now).elapsed() >= SHORTAGE_TIME {
                        let what = format!("rank {}: accepting connections ({SHORTAGE_HINT})", self.rank);
                        return Err(Error::io(what, error));
                    }
                    self.warn_of_shortage("accept connections", &error);
                    self.paused_until = Some(Instant::now() + PAUSE);
                    break;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock || is_of_one_connection(&error) => break,
                Err(error) => return Err(Error::io(format!("rank {}: accepting connections", self.rank), error)),
            }
        }
        Ok(())
    }

    /// Warns that the system has no resources to do this.
    pub(crate) fn warn_of_shortage(&mut self, what: &str, error: &std::io::Error) {
        let rank = self.rank;
        self.warnings
            .warn(format_args!("rank {rank} cannot {what} for now, and tries again: {error} ({SHORTAGE_HINT})"));
    }

    /// Closes the connection that has been silent the longest. A greeting that has already arrived is read first, so
    /// only callers that really are silent are closed. Returns whether one caller fewer is silent.
    fn close_oldest(&mut self, conversations: &mut Vec<Conversation>) -> bool {
        let Some(oldest) = conversations.iter_mut().position(|other| other.is_silent()) else { return false };
        if let Heard::All = conversations[oldest].read() {
            return true;
        }
        let Conversation { address, .. } = conversations.remove(oldest);
        self.refuse(address, "it has not identified itself, and others want to connect");
        true
    }

    /// Closes the first caller that claims the most claimed rank and has not proved it, unless its proof has arrived. Returns
    /// whether one caller fewer lacks a proof.
    fn close_unproved(&mut self, conversations: &mut Vec<Conversation>) -> bool {
        let mut claims = BTreeMap::<usize, usize>::new();
        conversations.iter().filter_map(Conversation::claim).for_each(|rank| *claims.entry(rank).or_default() += 1);
        let Some((rank, _)) = claims.into_iter().max_by_key(|(_, count)| *count) else { return false };
        let claiming = conversations.iter_mut().enumerate().filter(|(_, other)| other.claim() == Some(rank));
        let Some((first, other)) = claiming.min_by_key(|(_, other)| other.since) else { return false };
        if let Heard::All = other.read() {
            return true;
        }
        let Conversation { address, .. } = conversations.remove(first);
        self.refuse_unproved(address, rank);
        true
    }

    /// Warns of a caller that claims to be `rank` but does not prove that it knows the secret.
    pub(crate) fn refuse_unproved(&mut self, address: SocketAddr, rank: usize) {
        self.unproved = Some((address, rank));
        self.refuse(
            address,
            format_args!("it claims to be rank {rank}, but did not prove that it has the job's secret"),
        );
    }

    /// Describes the last such caller, for an error.
    pub(crate) fn strangers(&self) -> String {
        self.unproved.map_or_else(String::new, |(address, rank)| {
            format!(
                ". {address} claims to be rank {rank}, but did not prove that it has the secret of this rank: \
                 {SAME_SECRET}"
            )
        })
    }

    /// Warns of a connection that was refused.
    pub(crate) fn refuse(&mut self, address: SocketAddr, reason: impl Display) {
        let rank = self.rank;
        self.warnings.warn(format_args!("rank {rank} refused a connection from {address}: {reason}"));
    }
}

/// Whether somebody calls.
fn is_ringing(listener: &TcpListener) -> bool {
    let mut fds = [PollFd::new(listener, PollFlags::IN)];
    // After an error, `accept` says why.
    !matches!(poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(0))
}

fn silent(conversations: &[Conversation]) -> usize {
    conversations.iter().filter(|conversation| conversation.is_silent()).count()
}

/// Whether an error concerns only the connection that was about to be accepted, and not the next one (accept(2)).
fn is_of_one_connection(error: &std::io::Error) -> bool {
    matches!(
        Errno::from_io_error(error),
        Some(
            Errno::INTR
                | Errno::CONNABORTED
                | Errno::CONNRESET
                | Errno::PROTO
                | Errno::PERM
                | Errno::TIMEDOUT
                | Errno::NETDOWN
                | Errno::NETUNREACH
                | Errno::HOSTDOWN
                | Errno::HOSTUNREACH
                | Errno::NONET
                | Errno::NOPROTOOPT
                | Errno::OPNOTSUPP
        )
    )
}

/// A connection whose handshake is not over.
pub(crate) struct Conversation {
    pub(crate) socket: TcpStream,
    pub(crate) address: SocketAddr,
    pub(crate) stage: Stage,
    /// The time of its last stage.
    pub(crate) since: Instant,
    buffer: [u8; REPLY],
    read: usize,
}

/// A connection that this rank wants.
#[derive(Clone, Copy)]
pub(crate) struct Call {
    pub(crate) peer: usize,
    pub(crate) kind: Kind,
    /// How often the peer was called for this connection before.
    pub(crate) attempts: u32,
    /// Since when the system has had no resources for it.
    pub(crate) short_since: Option<Instant>,
}

/// The stage of a connection: the event that this rank waits for.
pub(crate) enum Stage {
    /// The connection that this rank has asked the system for.
    Connecting { call: Call },
    /// The greeting of a caller.
    Greeting,
    /// The reply to this rank's greeting, which it has sent for that call.
    Reply { call: Call, expected: Handshake, sent: Greeting },
    /// The proof of a caller, which has sent this handshake.
    Proof { caller: Handshake, exchange: Exchange },
}

pub(crate) enum Heard {
    Nothing,
    Closed,
    /// All expected bytes.
    All,
}

impl Conversation {
    pub(crate) fn new(socket: TcpStream, address: SocketAddr, stage: Stage) -> Self {
        Self { socket, address, stage, since: Instant::now(), buffer: [0; REPLY], read: 0 }
    }

    /// Whether the caller has not yet sent its whole greeting, as far as this end has read.
    fn is_silent(&self) -> bool {
        matches!(self.stage, Stage::Greeting) && self.read < GREETING
    }

    /// The call that this rank has made.
    pub(crate) fn call(&self) -> Option<&Call> {
        match &self.stage {
            Stage::Connecting { call } | Stage::Reply { call, .. } => Some(call),
            Stage::Greeting | Stage::Proof { .. } => None,
        }
    }

    /// The rank that a caller claims to be whose proof has not arrived, as far as this end has read.
    fn claim(&self) -> Option<usize> {
        match &self.stage {
            Stage::Proof { caller, .. } if self.read < PROOF => Some(caller.rank),
            _ => None,
        }
    }

    /// Whether the caller claims to be `peer`.
    pub(crate) fn is_caller(&self, peer: usize) -> bool {
        matches!(&self.stage, Stage::Proof { caller, .. } if caller.rank == peer)
    }

    /// The number of bytes that this rank waits for.
    fn awaited(&self) -> usize {
        match self.stage {
            Stage::Connecting { .. } | Stage::Greeting => GREETING,
            Stage::Reply { .. } => REPLY,
            Stage::Proof { .. } => PROOF,
        }
    }

    /// The bytes that have arrived.
    pub(crate) fn heard(&self) -> &[u8] {
        &self.buffer[..self.read]
    }

    /// Waits for the caller's proof.
    pub(crate) fn await_proof(mut self, caller: Handshake, exchange: Exchange) -> Self {
        (self.stage, self.since, self.read) = (Stage::Proof { caller, exchange }, Instant::now(), 0);
        self
    }

    /// Whether the other end has closed the connection, as far as this one knows.
    pub(crate) fn is_closed(&self) -> bool {
        match self.socket.peek(&mut [0]) {
            Ok(count) => count == 0,
            Err(error) => !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
        }
    }

    /// Reads no byte beyond those expected: the group's own data may follow.
    pub(crate) fn read(&mut self) -> Heard {
        let awaited = self.awaited();
        while self.read < awaited {
            match self.socket.read(&mut self.buffer[self.read..awaited]) {
                Ok(0) => return Heard::Closed,
                Ok(count) => self.read += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Heard::Nothing,
                Err(_) => return Heard::Closed,
            }
        }
        Heard::All
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Error as IoError, Write};

    /// Strangers that are not accepted yet: fewer than the shortest queue of a system holds.
    const QUEUED: usize = 50;

    fn accept(acceptor: &mut Acceptor, conversations: &mut Vec<Conversation>) {
        acceptor.accept(conversations).unwrap();
        assert!(silent(conversations) <= SILENT);
    }

    #[test]
    fn silent_strangers_do_not_keep_a_peer_waiting() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let (mut acceptor, mut conversations) = (Acceptor::new(listener, 0), Vec::new());
        // A peer that was accepted in time, and whose greeting has not been read yet, keeps its place.
        let mut early = TcpStream::connect(address).unwrap();
        accept(&mut acceptor, &mut conversations);
        early.write_all(&[1; GREETING]).unwrap();
        let mut strangers = Vec::new();
        while strangers.len() < SILENT + 2 * QUEUED {
            let mut stranger = TcpStream::connect(address).unwrap();
            // Half of them send a byte.
            stranger.write_all(&[7; 1][..strangers.len() % 2]).unwrap();
            strangers.push(stranger);
            if strangers.len().is_multiple_of(QUEUED) {
                accept(&mut acceptor, &mut conversations);
            }
        }
        let mut late = TcpStream::connect(address).unwrap();
        late.write_all(&[2; GREETING]).unwrap();
        accept(&mut acceptor, &mut conversations);
        let mut heard = Vec::new();
        for conversation in &mut conversations {
            if let Heard::All = conversation.read() {
                heard.push(conversation.heard()[0]);
            }
        }
        assert_eq!(heard, [1, 2]);
        assert_eq!(silent(&conversations), SILENT - 1);
    }

    /// A caller that has sent its greeting as this rank and is to prove it, and its own end.
    fn claiming(rank: usize) -> (Conversation, TcpStream) {
        use crate::tcp::handshake::{By, HandshakeConfig};
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let caller = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (socket, address) = listener.accept().unwrap();
        socket.set_nonblocking(true).unwrap();
        let config = HandshakeConfig { world_size: 4, secret: true, segment: 1, small: 1 };
        let handshake = Handshake { nonce: 7, rank, kind: Kind::Control, control: By::Higher, config };
        let exchange = Exchange { caller: [0; GREETING], callee: [0; GREETING] };
        (Conversation::new(socket, address, Stage::Greeting).await_proof(handshake, exchange), caller)
    }

    fn acceptor() -> Acceptor {
        Acceptor::new(TcpListener::bind("127.0.0.1:0").unwrap(), 0)
    }

    #[test]
    fn who_claims_a_rank_takes_no_places_of_those_that_claim_another_one() {
        let (mut acceptor, mut conversations, mut callers) = (acceptor(), Vec::new(), Vec::new());
        // Rank 1 calls first, and its proof takes long. Then a stranger comes whose proof has arrived, if not been read.
        for rank in [1, 2].into_iter().chain([2; 2 * UNPROVED]).chain([3, 2]) {
            let (conversation, mut caller) = claiming(rank);
            if callers.len() == 1 {
                caller.write_all(&[9; PROOF]).unwrap();
            }
            conversations.push(conversation);
            callers.push(caller);
        }
        let newest = conversations.last().unwrap().address;
        acceptor.tidy(&mut conversations, 4, false);
        assert_eq!(conversations.len(), UNPROVED + 1);
        let kept: Vec<Option<usize>> = conversations.iter().map(Conversation::claim).collect();
        assert_eq!((kept[0], kept[1], kept[UNPROVED - 1]), (Some(1), None, Some(3)));
        assert!(kept[2..UNPROVED - 1].iter().all(|claim| *claim == Some(2)));
        assert_eq!(conversations[UNPROVED].address, newest);
    }

    #[test]
    fn a_caller_may_take_its_time_for_the_proof_only_while_the_group_is_created() {
        let (mut acceptor, (mut late, _caller), (early, _other)) = (acceptor(), claiming(1), claiming(1));
        late.since = late.since.checked_sub(HANDSHAKE_TIME).unwrap();
        let mut conversations = vec![late, early];
        acceptor.tidy(&mut conversations, 4, false);
        assert_eq!(conversations.len(), 2);
        acceptor.tidy(&mut conversations, 4, true);
        assert_eq!(conversations.len(), 1);
        assert!(acceptor.strangers().contains("claims to be rank 1"));
    }

    #[test]
    fn callers_without_a_proof_give_way_when_the_system_has_no_room() {
        let (mut acceptor, (one, _caller), (other, _other)) = (acceptor(), claiming(1), claiming(2));
        let mut conversations = vec![one, other];
        assert!(acceptor.close_unproved(&mut conversations) && acceptor.close_unproved(&mut conversations));
        assert!(conversations.is_empty() && !acceptor.close_unproved(&mut conversations));
    }

    #[test]
    fn no_passing_error_ends_a_rank() {
        let error = |errno: Errno| IoError::from_raw_os_error(errno.raw_os_error());
        for errno in [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM] {
            assert!(is_shortage(&error(errno)) && !is_of_one_connection(&error(errno)), "{errno}");
        }
        for errno in [Errno::INTR, Errno::CONNABORTED, Errno::CONNRESET, Errno::PROTO, Errno::NETDOWN] {
            assert!(is_of_one_connection(&error(errno)) && !is_shortage(&error(errno)), "{errno}");
        }
        assert!(!is_of_one_connection(&error(Errno::BADF)) && !is_shortage(&error(Errno::BADF)));
    }
}
