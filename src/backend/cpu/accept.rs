//! Accepts connections while a group is made. A peer sends its handshake at once; other programs that find the port cannot
//! keep peers out.
use super::handshake::Handshake;
use crate::error::{SHORTAGE_HINT, is_shortage};
use crate::warnings::Warnings;
use crate::{Error, Result};
use rustix::io::Errno;
use std::fmt::Display;
use std::io::{ErrorKind, Read};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// How long a caller has to send its handshake.
const HANDSHAKE_TIME: Duration = Duration::from_secs(3);
/// How many callers may be silent at a time. Others wait in the system's queue until these have sent their handshakes or
/// have had their time.
const SILENT: usize = 512;
/// How long nothing is accepted after the system ran out of resources for it.
const PAUSE: Duration = Duration::from_millis(100);

/// The listening side of one rank.
pub(super) struct Acceptor<'a> {
    listener: &'a TcpListener,
    rank: usize,
    paused_until: Option<Instant>,
    warnings: Warnings,
}

impl<'a> Acceptor<'a> {
    pub(super) fn new(listener: &'a TcpListener, rank: usize) -> Self {
        Self { listener, rank, paused_until: None, warnings: Warnings::new(format!("rank {rank}")) }
    }

    /// Closes the connections that have been silent for too long. Returns the listener if it is to be waited for.
    pub(super) fn prepare(&mut self, conversations: &mut Vec<Conversation>) -> Option<&'a TcpListener> {
        let (now, rank, warnings) = (Instant::now(), self.rank, &mut self.warnings);
        conversations.retain(|Conversation { address, called, since, .. }| {
            let keep = called.is_some() || now.duration_since(*since) < HANDSHAKE_TIME;
            if !keep {
                warnings
                    .warn(format_args!("rank {rank} closed the connection of {address}, which did not say who it is"));
            }
            keep
        });
        self.paused_until = self.paused_until.filter(|until| now < *until);
        (self.paused_until.is_none() && silent(conversations) < SILENT).then_some(self.listener)
    }

    /// How long to wait for what is already connected before the listener is looked at again.
    pub(super) fn patience(&self) -> Duration {
        if self.paused_until.is_some() { PAUSE } else { Duration::MAX }
    }

    /// Accepts all waiting connections.
    pub(super) fn accept(&mut self, conversations: &mut Vec<Conversation>) -> Result<()> {
        while silent(conversations) < SILENT {
            match self.listener.accept() {
                Ok((socket, address)) => {
                    if socket.set_nonblocking(true).is_ok() {
                        conversations.push(Conversation::new(socket, address, None));
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

    /// Warns of a connection that was refused.
    pub(super) fn refuse(&mut self, address: SocketAddr, reason: impl Display) {
        let rank = self.rank;
        self.warnings.warn(format_args!("rank {rank} refused a connection from {address}: {reason}"));
    }
}

fn silent(conversations: &[Conversation]) -> usize {
    conversations.iter().filter(|conversation| conversation.called.is_none()).count()
}

/// Errors of a connection that was about to be accepted, which say nothing about the next one (accept(2)).
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

/// A connection on which a handshake is awaited.
pub(super) struct Conversation {
    pub(super) socket: TcpStream,
    pub(super) address: SocketAddr,
    /// The reply that is expected, when this rank has called.
    pub(super) called: Option<Handshake>,
    since: Instant,
    buffer: [u8; Handshake::BYTES],
    read: usize,
}

pub(super) enum Heard {
    Nothing,
    Closed,
    Handshake([u8; Handshake::BYTES]),
}

impl Conversation {
    pub(super) fn new(socket: TcpStream, address: SocketAddr, called: Option<Handshake>) -> Self {
        Self { socket, address, called, since: Instant::now(), buffer: [0; Handshake::BYTES], read: 0 }
    }

    pub(super) fn read(&mut self) -> Heard {
        loop {
            match self.socket.read(&mut self.buffer[self.read..]) {
                Ok(0) => return Heard::Closed,
                Ok(count) => self.read += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Heard::Nothing,
                Err(_) => return Heard::Closed,
            }
            if self.read == Handshake::BYTES {
                return Heard::Handshake(self.buffer);
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
