//! Accepts connections while a group is created. A peer sends its greeting at once; other programs that find the port
//! cannot keep peers out.
use super::handshake::{Exchange, GREETING, Greeting, Handshake, REPLY, SAME_SECRET};
use crate::error::{SHORTAGE_HINT, is_shortage};
use crate::rendezvous::secret::PROOF;
use crate::warnings::Warnings;
use crate::{Error, Result};
use rustix::io::Errno;
use std::fmt::Display;
use std::io::{ErrorKind, Read};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// How long a caller has to send its greeting, and to prove that it has the secret where others wait to do so. A peer
/// proves it at once, except while it waits for other ranks.
const HANDSHAKE_TIME: Duration = Duration::from_secs(3);
/// How many callers may be silent at a time. Others wait in the system's queue until one of these has sent its
/// greeting or timed out.
const SILENT: usize = 512;
/// The pause after the system ran out of resources for a connection.
const PAUSE: Duration = Duration::from_millis(100);

/// The listening side of one rank.
pub(super) struct Acceptor<'a> {
    listener: &'a TcpListener,
    rank: usize,
    paused_until: Option<Instant>,
    /// The last caller that did not prove that it knows the secret, and the rank that it claimed.
    unproved: Option<(SocketAddr, usize)>,
    warnings: Warnings,
}

impl<'a> Acceptor<'a> {
    pub(super) fn new(listener: &'a TcpListener, rank: usize) -> Self {
        Self { listener, rank, paused_until: None, unproved: None, warnings: Warnings::new(format!("rank {rank}")) }
    }

    /// Closes connections that have been silent for too long. Returns the listener unless accepting is paused.
    pub(super) fn prepare(&mut self, conversations: &mut Vec<Conversation>) -> Option<&'a TcpListener> {
        let (now, rank, warnings) = (Instant::now(), self.rank, &mut self.warnings);
        conversations.retain(|Conversation { address, stage, since, .. }| {
            let keep = !matches!(stage, Stage::Greeting) || now.duration_since(*since) < HANDSHAKE_TIME;
            if !keep {
                warnings
                    .warn(format_args!("rank {rank} closed the connection of {address}, which did not say who it is"));
            }
            keep
        });
        self.paused_until = self.paused_until.filter(|until| now < *until);
        (self.paused_until.is_none() && silent(conversations) < SILENT).then_some(self.listener)
    }

    /// How long to wait for the existing connections before the listener is checked again.
    pub(super) fn patience(&self) -> Duration {
        if self.paused_until.is_some() { PAUSE } else { Duration::MAX }
    }

    /// Accepts all waiting connections.
    pub(super) fn accept(&mut self, conversations: &mut Vec<Conversation>) -> Result<()> {
        while silent(conversations) < SILENT {
            match self.listener.accept() {
                Ok((socket, address)) => {
                    if socket.set_nonblocking(true).is_ok() {
                        conversations.push(Conversation::new(socket, address, Stage::Greeting));
                    }
                }
                Err(error) if is_shortage(&error) => {
                    let rank = self.rank;
                    self.warnings.warn(format_args!(
                        "rank {rank} cannot accept connections for now, and tries again: {error} ({SHORTAGE_HINT})"
                    ));
                    self.paused_until = Some(Instant::now() + PAUSE);
                    break;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock || is_of_one_connection(&error) => break,
                Err(error) => return Err(Error::io(format!("rank {}: accepting connections", self.rank), error)),
            }
        }
        Ok(())
    }

    /// Whether one more caller may prove that it has the secret, of at most `limit` at a time. One that has had its time for
    /// that gives way. A peer that was turned away calls again.
    pub(super) fn make_room(&mut self, conversations: &mut Vec<Conversation>, limit: usize) -> bool {
        if conversations.iter().filter(|other| other.is_proving()).count() < limit {
            return true;
        }
        let late = |other: &Conversation| other.is_proving() && other.since.elapsed() >= HANDSHAKE_TIME;
        let Some(late) = conversations.iter().position(late) else { return false };
        let other = conversations.remove(late);
        if let Stage::Proof { caller, .. } = other.stage {
            self.refuse_unproved(other.address, caller.rank);
        }
        true
    }

    /// Warns of a caller that says that it is `rank` and does not prove that it knows the secret.
    pub(super) fn refuse_unproved(&mut self, address: SocketAddr, rank: usize) {
        self.unproved = Some((address, rank));
        self.refuse(
            address,
            format_args!("it said that it is rank {rank}, and did not prove that it has the job's secret"),
        );
    }

    /// Tells, for an error, of the last one of these.
    pub(super) fn strangers(&self) -> String {
        self.unproved.map_or_else(String::new, |(address, rank)| {
            format!(". {address} said that it is rank {rank}, but did not prove that it has the secret of this rank: {SAME_SECRET}")
        })
    }

    /// Warns of a connection that was refused.
    pub(super) fn refuse(&mut self, address: SocketAddr, reason: impl Display) {
        let rank = self.rank;
        self.warnings.warn(format_args!("rank {rank} refused a connection from {address}: {reason}"));
    }
}

fn silent(conversations: &[Conversation]) -> usize {
    conversations.iter().filter(|conversation| matches!(conversation.stage, Stage::Greeting)).count()
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
pub(super) struct Conversation {
    pub(super) socket: TcpStream,
    pub(super) address: SocketAddr,
    pub(super) stage: Stage,
    since: Instant,
    buffer: [u8; REPLY],
    read: usize,
}

/// What is awaited on a connection.
pub(super) enum Stage {
    /// The greeting of a caller.
    Greeting,
    /// The reply to this rank's greeting: from whom it must be.
    Reply { expected: Handshake, sent: Greeting },
    /// The proof of a caller, which has sent this handshake.
    Proof { caller: Handshake, exchange: Exchange },
}

pub(super) enum Heard {
    Nothing,
    Closed,
    /// All that was awaited.
    All,
}

impl Conversation {
    pub(super) fn new(socket: TcpStream, address: SocketAddr, stage: Stage) -> Self {
        Self { socket, address, stage, since: Instant::now(), buffer: [0; REPLY], read: 0 }
    }

    /// Whether the caller is still to prove that it knows the secret.
    pub(super) fn is_proving(&self) -> bool {
        matches!(self.stage, Stage::Proof { .. })
    }

    /// Whether the caller has said that it is `peer`.
    pub(super) fn is_caller(&self, peer: usize) -> bool {
        matches!(&self.stage, Stage::Proof { caller, .. } if caller.rank == peer)
    }

    /// How many bytes are awaited.
    fn awaited(&self) -> usize {
        match self.stage {
            Stage::Greeting => GREETING,
            Stage::Reply { .. } => REPLY,
            Stage::Proof { .. } => PROOF,
        }
    }

    /// What was heard.
    pub(super) fn heard(&self) -> &[u8] {
        &self.buffer[..self.read]
    }

    /// Waits for the caller's proof.
    pub(super) fn await_proof(mut self, caller: Handshake, exchange: Exchange) -> Self {
        (self.stage, self.since, self.read) = (Stage::Proof { caller, exchange }, Instant::now(), 0);
        self
    }

    /// Whether the other end has closed the connection, as far as this one knows.
    pub(super) fn is_closed(&self) -> bool {
        match self.socket.peek(&mut [0]) {
            Ok(count) => count == 0,
            Err(error) => !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
        }
    }

    /// Reads no byte beyond those that are awaited: the group's own may follow.
    pub(super) fn read(&mut self) -> Heard {
        let awaited = self.awaited();
        loop {
            match self.socket.read(&mut self.buffer[self.read..awaited]) {
                Ok(0) => return Heard::Closed,
                Ok(count) => self.read += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Heard::Nothing,
                Err(_) => return Heard::Closed,
            }
            if self.read == awaited {
                return Heard::All;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Error as IoError;

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
