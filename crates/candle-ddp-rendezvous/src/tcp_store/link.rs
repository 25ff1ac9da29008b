//! A connection of a client. Each step is bounded by a deadline.
use super::address::{no_way_to, resolve};
use super::protocol::{CHALLENGE, CLIENT, MAGIC, MAX_MESSAGE, OFFER, PROVEN, Request, SECRET_NEEDED, SERVER, bounded};
use crate::Secret;
use crate::secret::PROOF;
use candle_ddp_base::random::random_bytes;
use candle_ddp_base::warnings::warn_aloud;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// An error on a connection.
#[derive(Debug)]
pub(super) enum LinkError {
    /// The deadline passed.
    Timeout,
    /// The other side closed the connection, or it broke.
    Closed(io::Error),
    /// A reply that does not conform to the protocol.
    Protocol(String),
    /// The two ends do not have the same secret.
    Refused(String),
}

impl From<io::Error> for LinkError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => Self::Timeout,
            _ => Self::Closed(error),
        }
    }
}

type Result<T> = std::result::Result<T, LinkError>;

/// What to do if the two ends do not have the same secret.
const SAME: &str = "give all processes of the job the same secret (CANDLE_DDP_SECRET, or a file with \
                    CANDLE_DDP_SECRET_FILE); ddprun gives it to its workers";

/// How often to retry a connection that ends during the handshake: a flood of strangers may have pushed it out.
const RETRIES: u32 = 9;
/// The pause before the first of these; each further one is twice as long. When the ranks of a large job all connect at once, they
/// push each other out, so together the pauses must last longer than such a start.
const PAUSE: Duration = Duration::from_millis(5);

/// A connection on which both ends have proved that they know the secret, if there is one, and that has completed PING.
pub(super) struct Link {
    stream: TcpStream,
}

/// Whether the server may have closed the connection of a client that it does not know yet, in favour of others.
fn was_pushed_out(error: &io::Error) -> bool {
    use ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof)
}

/// Returns the time until `deadline`, at least 1 ms, because sockets take zero for no time-out.
fn left(deadline: Instant) -> Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(LinkError::Timeout) } else { Ok(left.max(Duration::from_millis(1))) }
}

impl Link {
    /// Connects to a server that is there, and proves `secret` to it, or tells it that there is none.
    pub(super) fn open(address: SocketAddr, secret: Option<&Secret>, deadline: Instant) -> Result<Self> {
        let mut retries = 0;
        loop {
            match Self::open_once(address, secret, deadline) {
                Err(LinkError::Closed(error)) if retries < RETRIES && was_pushed_out(&error) => {
                    let pause = PAUSE * (1 << retries);
                    retries += 1;
                    std::thread::sleep(pause.min(deadline.saturating_duration_since(Instant::now())));
                }
                result => return result,
            }
        }
    }

    fn open_once(address: SocketAddr, secret: Option<&Secret>, deadline: Instant) -> Result<Self> {
        let stream = TcpStream::connect_timeout(&address, left(deadline)?)?;
        if stream.local_addr()? == stream.peer_addr()? {
            // When connecting to a free port of this host, a socket may be assigned that same port and connect to
            // itself.
            return Err(LinkError::Closed(ErrorKind::ConnectionRefused.into()));
        }
        stream.set_nodelay(true)?;
        let mut link = Self { stream };
        // PyTorch's server drops a VALIDATE that arrives in pieces.
        let mut greeting = Vec::new();
        Request::Validate(MAGIC).encode(&mut greeting);
        link.send(&greeting, deadline)?;
        match secret {
            Some(secret) => link.prove(secret, deadline)?,
            None => link.ping(Vec::new(), deadline)?,
        }
        Ok(link)
    }

    /// Both ends prove that they know `secret`: this one first, since strangers ask servers rather than clients.
    fn prove(&mut self, secret: &Secret, deadline: Instant) -> Result<()> {
        let mut offer = Vec::new();
        Request::Ping(OFFER).encode(&mut offer);
        self.send(&offer, deadline)?;
        match u32::from_le_bytes(self.receive(deadline)?) {
            CHALLENGE => {}
            OFFER => {
                return Err(LinkError::Refused(format!(
                    "this process has a secret, but the store does not prove that it knows it: {SAME}. If the store is \
                     PyTorch's, start this program without the variable"
                )));
            }
            other => return Err(LinkError::Protocol(format!("unexpected reply {other:#x} to PING {OFFER:#x}"))),
        }
        let theirs: [u8; PROOF] = self.receive(deadline)?;
        let own = random_bytes::<PROOF>().map_err(|error| LinkError::Closed(io::Error::other(error)))?;
        let mut proof = Vec::new();
        Request::Prove { nonce: own, proof: secret.prove(CLIENT, &[&own, &theirs]) }.encode(&mut proof);
        self.send(&proof, deadline)?;
        if self.receive(deadline)? == [PROVEN] {
            let proof: [u8; PROOF] = self.receive(deadline)?;
            if secret.verify(SERVER, &[&own, &theirs], &proof) {
                return Ok(());
            }
        }
        Err(LinkError::Refused(format!("the store has another secret than this process: {SAME}")))
    }

    /// Returns the local address of the connection.
    pub(super) fn local_addr(&self) -> io::Result<SocketAddr> {
        self.stream.local_addr()
    }

    /// Returns the server's address.
    pub(super) fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.stream.peer_addr()
    }

    pub(super) fn send(&mut self, mut bytes: &[u8], deadline: Instant) -> Result<()> {
        while !bytes.is_empty() {
            self.stream.set_write_timeout(Some(left(deadline)?))?;
            match self.stream.write(bytes) {
                Ok(0) => return Err(LinkError::Closed(ErrorKind::WriteZero.into())),
                Ok(count) => bytes = bytes.get(count..).unwrap_or_default(),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Sends `bytes`, which have no reply of their own, and a PING, whose reply shows that they have been executed.
    pub(super) fn ping(&mut self, mut bytes: Vec<u8>, deadline: Instant) -> Result<()> {
        let nonce = std::process::id();
        Request::Ping(nonce).encode(&mut bytes);
        self.send(&bytes, deadline)?;
        let answer = u32::from_le_bytes(self.receive(deadline)?);
        if answer == SECRET_NEEDED {
            return Err(LinkError::Refused(format!("the store requires a secret, but this process has none: {SAME}")));
        }
        if answer != nonce {
            return Err(LinkError::Protocol(format!("unexpected reply {answer:#x} to PING {nonce:#x}")));
        }
        Ok(())
    }

    pub(super) fn receive<const N: usize>(&mut self, deadline: Instant) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        let mut filled = 0;
        while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            filled += self.read(rest, deadline)?;
        }
        Ok(bytes)
    }

    pub(super) fn receive_i64(&mut self, deadline: Instant) -> Result<i64> {
        self.receive(deadline).map(i64::from_le_bytes)
    }

    /// Receives a length and that many bytes. Memory grows with the received bytes, not with the announced length.
    pub(super) fn receive_bytes(&mut self, deadline: Instant) -> Result<Vec<u8>> {
        let length = u64::from_le_bytes(self.receive(deadline)?);
        let length = bounded(length, MAX_MESSAGE, "bytes in a reply").map_err(|error| LinkError::Protocol(error.0))?;
        let mut bytes = Vec::new();
        let mut chunk = [0; 1 << 14];
        while bytes.len() < length {
            let wanted = chunk.len().min(length - bytes.len());
            let Some(part) = chunk.get_mut(..wanted) else { break };
            let count = self.read(part, deadline)?;
            bytes.extend_from_slice(part.get(..count).unwrap_or_default());
        }
        Ok(bytes)
    }

    fn read(&mut self, bytes: &mut [u8], deadline: Instant) -> Result<usize> {
        loop {
            self.stream.set_read_timeout(Some(left(deadline)?))?;
            match self.stream.read(bytes) {
                Ok(0) => return Err(LinkError::Closed(ErrorKind::UnexpectedEof.into())),
                Ok(count) => return Ok(count),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Why connecting failed.
pub(super) enum ConnectError {
    /// The deadline passed; with the last error.
    Timeout(String),
    /// The server at this address is not a store.
    Protocol(String),
    /// The server does not have the same secret.
    Refused(String),
    /// This host has no route to that address.
    Unreachable(String),
}

/// How long a network may take to come up, while this host has no route.
const NETWORK: Duration = Duration::from_secs(10);
/// After this time without a connection, a warning says so.
const NOTICE: Duration = Duration::from_secs(10);

/// Connects to `host`, retrying until `deadline`, because the server and its name may appear later. Warnings about the retries end
/// with `why`, the reason why this process connects.
pub(super) fn connect(
    host: &str,
    port: u16,
    secret: Option<&Secret>,
    deadline: Instant,
    why: &str,
) -> std::result::Result<Link, ConnectError> {
    let mut pause = Duration::from_millis(5);
    let mut last = String::new();
    let (started, mut is_warned) = (Instant::now(), false);
    let mut unreachable: Option<Instant> = None;
    let mut note = |reason: String| {
        // An attempt that the deadline cut short says less than the error before it.
        if last.is_empty() || Instant::now() < deadline {
            last = reason;
        }
        last.clone()
    };
    loop {
        let mut reason = String::new();
        match resolve(host, port, deadline) {
            Err(error) => {
                if !std::mem::replace(&mut is_warned, true) {
                    let question = "Retrying until the time-out. Is the store's address right?";
                    warn_aloud(format_args!("{error}. {question}{}", why.strip_prefix('.').unwrap_or(why)));
                }
                reason = note(error);
            }
            Ok(addresses) => {
                let share = u32::try_from(addresses.len()).unwrap_or(u32::MAX).max(1);
                let (mut reachable, mut is_loopback) = (false, true);
                for address in addresses {
                    is_loopback &= address.ip().is_loopback();
                    // An address that drops packets must not use up the time of the other addresses.
                    let rest = deadline.saturating_duration_since(Instant::now());
                    let turn = Instant::now() + (rest / share).min(Duration::from_secs(20));
                    reason = note(match Link::open(address, secret, turn) {
                        Ok(link) => return Ok(link),
                        Err(LinkError::Refused(reason)) => return Err(ConnectError::Refused(reason)),
                        Err(LinkError::Protocol(reason)) => return Err(ConnectError::Protocol(reason)),
                        Err(LinkError::Closed(error)) if error.kind() == ErrorKind::NetworkUnreachable => {
                            let why = || format!("{address}: {error}. This host has no route to that address");
                            if address.ip().is_loopback() { no_way_to(address) } else { why() }
                        }
                        Err(error) => {
                            reachable = true;
                            match error {
                                LinkError::Closed(error) => format!("{address}: {error}"),
                                _ => format!("{address} does not answer"),
                            }
                        }
                    });
                }
                // No packet has left this host.
                match unreachable.filter(|_| !reachable) {
                    Some(since) if since.elapsed() >= NETWORK => return Err(ConnectError::Unreachable(reason)),
                    _ if reachable => unreachable = None,
                    _ if is_loopback => return Err(ConnectError::Unreachable(reason)),
                    Some(_) => {}
                    None => {
                        warn_aloud(format_args!("{reason}. Retrying for {NETWORK:?}. Is the store's address right?"));
                        unreachable = Some(Instant::now());
                    }
                }
            }
        }
        if started.elapsed() >= NOTICE && !std::mem::replace(&mut is_warned, true) {
            warn_aloud(format_args!(
                "the store has not been there for {NOTICE:?}: {reason}. Retrying until the time-out{why}"
            ));
        }
        // Ranks start at the same time; they should not all connect at the same moment.
        let jitter = std::process::id() % 8;
        let sleep = pause + pause * jitter / 8;
        if Instant::now() + sleep >= deadline {
            std::thread::sleep(deadline.saturating_duration_since(Instant::now()));
            return Err(ConnectError::Timeout(reason));
        }
        std::thread::sleep(sleep);
        pause = (pause * 3 / 2).min(Duration::from_secs(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn a_client_that_is_pushed_out_comes_again() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let server = std::thread::spawn(move || {
            for _ in 0..7 {
                drop(listener.accept().unwrap());
            }
            let (mut client, _) = listener.accept().unwrap();
            // VALIDATE and PING, each a byte and four of its number. The reply is the number of PING.
            let mut requests = [0; 10];
            client.read_exact(&mut requests).unwrap();
            client.write_all(&requests[6..]).unwrap();
        });
        Link::open(address, None, Instant::now() + Duration::from_secs(60)).map(drop).unwrap();
        server.join().unwrap();
    }
}
