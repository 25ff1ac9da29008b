//! Builds the connections between all ranks.
//!
//! Every rank listens and publishes its address in the store; of two ranks, the higher one connects to the lower one.
//! Both sides say [hello](super::hello). A rank waits for the replies to its own hellos only after it has answered those
//! of the higher ranks, so that no two ranks wait for each other.
use super::hello::{Hello, Kind, Stranger, Terms};
use crate::rendezvous::Store;
use crate::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// The connections of one rank, non-blocking; by rank, `None` for itself.
pub(super) struct Connections {
    pub(super) data: Vec<Option<TcpStream>>,
    pub(super) direct: Vec<Option<TcpStream>>,
    pub(super) control: Vec<Option<TcpStream>>,
}

/// One rank on its way into the group.
pub(super) struct Connector<'a> {
    pub(super) store: &'a dyn Store,
    pub(super) rank: usize,
    pub(super) terms: Terms,
    pub(super) address: IpAddr,
    pub(super) timeout: Duration,
    pub(super) deadline: Instant,
}

/// One of the three connections to a peer.
type Slots = [Option<TcpStream>; Kind::ALL.len()];

impl Connector<'_> {
    pub(super) fn connect(&self) -> Result<Connections> {
        let world_size = self.terms.world_size;
        let context = || format!("rank {}: listening on {}", self.rank, self.address);
        let listener = TcpListener::bind((self.address, 0)).map_err(|error| Error::io(context(), error))?;
        listener.set_nonblocking(true).map_err(|error| Error::io(context(), error))?;
        let own = listener.local_addr().map_err(|error| Error::io(context(), error))?;
        let drawn = RandomState::new().build_hasher().finish();
        self.store.set(&key(self.rank), format!("{own} {drawn:016x}").as_bytes())?;

        let mut nonce = drawn;
        let mut slots: Vec<Slots> = (0..world_size).map(|_| Slots::default()).collect();
        for peer in 0..self.rank {
            let (address, drawn) = self.look_up(peer)?;
            if peer == 0 {
                nonce = drawn;
            }
            for kind in Kind::ALL {
                slots[peer][kind as usize] = Some(self.call(peer, address, self.hello(nonce, kind))?);
            }
        }
        self.accept(&listener, nonce, &mut slots)?;
        for (peer, slots) in slots.iter_mut().enumerate().take(self.rank) {
            for (kind, socket) in Kind::ALL.into_iter().zip(slots.iter_mut().flatten()) {
                self.read_reply(peer, socket, Hello { rank: peer, ..self.hello(nonce, kind) })?;
            }
        }

        let mut connections = Connections { data: vec![], direct: vec![], control: vec![] };
        for (peer, slots) in slots.into_iter().enumerate() {
            for socket in slots.iter().flatten() {
                prepare(socket).map_err(|error| self.failed(&[peer], format!("preparing the connection: {error}")))?;
            }
            let [data, direct, control] = slots;
            if let Some(control) = &control {
                keep_alive(control);
            }
            connections.data.push(data);
            connections.direct.push(direct);
            connections.control.push(control);
        }
        Ok(connections)
    }

    fn hello(&self, nonce: u64, kind: Kind) -> Hello {
        Hello { nonce, rank: self.rank, kind, terms: self.terms }
    }

    fn left(&self) -> Duration {
        // Zero is no time-out that a socket accepts.
        self.deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
    }

    fn failed(&self, peers: &[usize], reason: impl Into<String>) -> Error {
        Error::Connect { rank: self.rank, peers: peers.to_vec(), timeout: self.timeout, reason: reason.into() }
    }

    /// The address of `peer`, and the number it has drawn.
    fn look_up(&self, peer: usize) -> Result<(SocketAddr, u64)> {
        let key = key(peer);
        if let Err(error) = self.store.wait(&[&key], Some(self.left())) {
            if !matches!(error, Error::StoreTimeout { .. }) {
                return Err(error);
            }
            let missing: Vec<usize> =
                (0..self.rank).filter(|peer| !self.store.check(&[&self::key(*peer)]).unwrap_or(false)).collect();
            return Err(self.failed(&missing, format!("they have not come to the rendezvous ({error})")));
        }
        let value = self.store.get(&key)?;
        let parse = || {
            let (address, drawn) = std::str::from_utf8(&value).ok()?.split_once(' ')?;
            Some((address.parse().ok()?, u64::from_str_radix(drawn, 16).ok()?))
        };
        let text = String::from_utf8_lossy(&value);
        parse().ok_or_else(|| self.failed(&[peer], format!("the store holds {text:?} as its address")))
    }

    /// Connects to `peer` and says hello.
    fn call(&self, peer: usize, address: SocketAddr, hello: Hello) -> Result<TcpStream> {
        let connect = || {
            let mut socket = TcpStream::connect_timeout(&address, self.left())?;
            socket.write_all(&hello.encode())?;
            Ok(socket)
        };
        connect().map_err(|error: std::io::Error| {
            self.failed(&[peer], format!("connecting to {address}: {error}. Is that address reachable from this host?"))
        })
    }

    /// Waits for the connections of all higher ranks.
    fn accept(&self, listener: &TcpListener, nonce: u64, slots: &mut [Slots]) -> Result<()> {
        /// Connections that have not said hello yet; beyond this the oldest ones go.
        const CALLERS: usize = 1024;
        let mut callers: Vec<Caller> = Vec::new();
        loop {
            let missing: Vec<usize> =
                (self.rank + 1..slots.len()).filter(|peer| slots[*peer].iter().any(Option::is_none)).collect();
            if missing.is_empty() {
                return Ok(());
            }
            let left = self.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(self.failed(&missing, "they have not connected to this rank"));
            }
            let mut fds = vec![PollFd::new(listener, PollFlags::IN)];
            fds.extend(callers.iter().map(|caller| PollFd::new(&caller.socket, PollFlags::IN)));
            match poll(&mut fds, Timespec::try_from(left).ok().as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(Error::io("waiting for connections", error)),
            }
            drop(fds);
            let mut waiting = Vec::with_capacity(callers.len());
            for mut caller in callers {
                match caller.read() {
                    Heard::Nothing => waiting.push(caller),
                    Heard::Closed => {}
                    Heard::Hello(hello) => self.welcome(caller, &hello, nonce, slots)?,
                }
            }
            callers = waiting;
            loop {
                match listener.accept() {
                    Ok((socket, address)) => {
                        if socket.set_nonblocking(true).is_ok() {
                            callers.push(Caller { socket, address, hello: [0; Hello::BYTES], read: 0 });
                        }
                    }
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
                    Err(error) => return Err(Error::io(format!("rank {}: accepting connections", self.rank), error)),
                }
            }
            callers.drain(..callers.len().saturating_sub(CALLERS));
        }
    }

    /// Checks the hello of a caller and answers it. Strangers are sent away; peers that do not fit are an error here,
    /// and by the reply there.
    fn welcome(&self, caller: Caller, hello: &[u8; Hello::BYTES], nonce: u64, slots: &mut [Slots]) -> Result<()> {
        let address = caller.address;
        let hello = match Hello::decode(hello) {
            Ok(hello) if hello.nonce == nonce => hello,
            Ok(hello) => {
                log::warn!("sent {address} away: it belongs to another group (as its rank {})", hello.rank);
                return Ok(());
            }
            Err(stranger) => {
                log::warn!("sent {address} away: {}", stranger.describe());
                if let Stranger::Version(_) = stranger {
                    // It should learn why; it is not waited for.
                    let _ = (&caller.socket).write(&self.hello(nonce, Kind::Control).encode());
                }
                return Ok(());
            }
        };
        // A socket's empty buffer takes these few bytes at once.
        let reply = (&caller.socket).write(&self.hello(nonce, hello.kind).encode());
        if let Some(difference) = hello.terms.difference(&self.terms) {
            return Err(self.failed(&[hello.rank], difference));
        }
        if !matches!(reply, Ok(Hello::BYTES)) {
            return Err(self.failed(&[hello.rank], "its connection closed at once"));
        }
        let slot =
            slots.get_mut(hello.rank).filter(|_| hello.rank > self.rank).map(|slots| &mut slots[hello.kind as usize]);
        match slot {
            Some(slot @ None) => {
                *slot = Some(caller.socket);
                Ok(())
            }
            Some(Some(_)) => Err(self.failed(
                &[hello.rank],
                format!(
                    "two processes say that they are this rank, one of them at {}: give each its own",
                    caller.address
                ),
            )),
            None => Err(self.failed(&[hello.rank], "it connected to a rank that is not below it")),
        }
    }

    /// Reads the reply of a lower rank.
    fn read_reply(&self, peer: usize, socket: &mut TcpStream, expected: Hello) -> Result<()> {
        let mut reply = [0; Hello::BYTES];
        let read = socket.set_read_timeout(Some(self.left())).and_then(|()| socket.read_exact(&mut reply));
        read.map_err(|error| match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => self.failed(&[peer], "it does not answer"),
            _ => self.failed(&[peer], format!("it closed the connection ({error}): see its own error")),
        })?;
        match Hello::decode(&reply) {
            Ok(hello) if hello == expected => Ok(()),
            Ok(hello) => Err(self.failed(
                &[peer],
                hello
                    .terms
                    .difference(&self.terms)
                    .unwrap_or_else(|| format!("rank {} of another group answers at its address", hello.rank)),
            )),
            Err(stranger) => Err(self.failed(&[peer], stranger.describe())),
        }
    }
}

fn key(rank: usize) -> String {
    format!("addr/{rank}")
}

fn prepare(socket: &TcpStream) -> std::io::Result<()> {
    socket.set_read_timeout(None)?;
    socket.set_nonblocking(true)?;
    socket.set_nodelay(true)
}

/// Finds out, within half a minute, that a host is gone without having closed its connections.
fn keep_alive(socket: &TcpStream) {
    use rustix::net::sockopt;
    let set = || {
        sockopt::set_socket_keepalive(socket, true)?;
        sockopt::set_tcp_keepidle(socket, Duration::from_secs(15))?;
        sockopt::set_tcp_keepintvl(socket, Duration::from_secs(5))?;
        sockopt::set_tcp_keepcnt(socket, 3)
    };
    if let Err(error) = set() {
        log::debug!("no TCP keepalive: {error}");
    }
}

/// A connection that has not said hello yet.
struct Caller {
    socket: TcpStream,
    address: SocketAddr,
    hello: [u8; Hello::BYTES],
    read: usize,
}

enum Heard {
    Nothing,
    Closed,
    Hello([u8; Hello::BYTES]),
}

impl Caller {
    fn read(&mut self) -> Heard {
        loop {
            match self.socket.read(&mut self.hello[self.read..]) {
                Ok(0) => return Heard::Closed,
                Ok(count) => self.read += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Heard::Nothing,
                Err(_) => return Heard::Closed,
            }
            if self.read == Hello::BYTES {
                return Heard::Hello(self.hello);
            }
        }
    }
}
