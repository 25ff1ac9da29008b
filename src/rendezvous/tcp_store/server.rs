use super::protocol::{Decoder, Malformed, READY, Request};
use super::state::{ClientId, State, is_greeting};
use crate::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The most clients at a time; one more is turned away at once.
const MAX_CLIENTS: usize = 16_384;
/// What is read from one client before the others have their turn.
const TURN: usize = 1 << 20;

/// The server that [`TcpStore`](super::TcpStore) and PyTorch's `TCPStore` clients talk to.
///
/// One thread serves all clients and sleeps while there is nothing to do. It never blocks on a client: one that does
/// not read its answers is not read from until it does. A client that sends anything malformed or beyond the bounds
/// (PyTorch's: keys of 8192 bytes, values of 8 MiB, 131,072 keys in a request; and 256 MiB in a message, a million keys
/// and 1 GiB in the store, 16,384 clients) is closed, with a warning in the log. Dropping the server closes every
/// connection and ends the thread.
///
/// As in PyTorch there is no authentication: whoever reaches the port can read and write. Keep it inside the cluster.
pub struct TcpStoreServer {
    address: SocketAddr,
    /// Closing this end is what stops the thread.
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl TcpStoreServer {
    /// Serves `port` of all interfaces, IPv6 and IPv4. Port 0 takes any that is free.
    pub fn bind(port: u16) -> Result<Self> {
        let both = listen(SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)));
        let listener = match both {
            // A system without IPv6.
            Err(rustix::io::Errno::AFNOSUPPORT | rustix::io::Errno::ADDRNOTAVAIL) => {
                listen(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)))
            }
            both => both,
        };
        Self::start(listener, &format!("port {port} of all interfaces"), MAX_CLIENTS)
    }

    /// Serves `address` only.
    pub fn bind_address(address: SocketAddr) -> Result<Self> {
        Self::bind_with(address, MAX_CLIENTS)
    }

    /// Serves `address` only, and at most `max_clients` at a time.
    pub fn bind_with(address: SocketAddr, max_clients: usize) -> Result<Self> {
        Self::start(listen(address), &address.to_string(), max_clients)
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// The address and port that it listens on; the address may be the unspecified one.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    fn start(listener: rustix::io::Result<TcpListener>, place: &str, max_clients: usize) -> Result<Self> {
        let context = |hint: &str| format!("cannot host the store on {place}{hint}");
        let listener = listener.map_err(|errno| {
            let hint = match errno {
                rustix::io::Errno::ADDRINUSE => {
                    ", another program has it (often an earlier run that is still alive): end that, \
                     or choose another port (MASTER_PORT)"
                }
                rustix::io::Errno::ADDRNOTAVAIL => ", which is no address of this host",
                _ => "",
            };
            Error::io(context(hint), errno)
        })?;
        let address = listener.local_addr().map_err(|error| Error::io(context(""), error))?;
        let (stop, stopped) = UnixStream::pair().map_err(|error| Error::io(context(""), error))?;
        let thread = std::thread::Builder::new()
            .name("candle-ddp-store".to_string())
            .spawn(move || Service::new(listener, stopped, max_clients).run())
            .map_err(|error| Error::io(context(""), error))?;
        Ok(Self { address, stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for TcpStoreServer {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // The thread has no way to panic; if it did, there is nobody left to tell.
            let _ = thread.join();
        }
    }
}

impl std::fmt::Debug for TcpStoreServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TcpStoreServer").field("address", &self.address).finish_non_exhaustive()
    }
}

fn listen(address: SocketAddr) -> rustix::io::Result<TcpListener> {
    let family = if address.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    // Connections of the last run that linger in TIME_WAIT must not keep the port.
    sockopt::set_socket_reuseaddr(&socket, true)?;
    if address == SocketAddr::from((Ipv6Addr::UNSPECIFIED, address.port())) {
        sockopt::set_ipv6_v6only(&socket, false)?;
    }
    rustix::net::bind(&socket, &address)?;
    // All ranks of a large job knock at the same moment.
    rustix::net::listen(&socket, 4096)?;
    Ok(TcpListener::from(socket))
}

struct Client {
    stream: TcpStream,
    peer: SocketAddr,
    greeted: bool,
    decoder: Decoder,
    /// Answers, of which the first `written` bytes have left.
    out: Vec<u8>,
    written: usize,
}

/// Why a client goes.
enum Leave {
    /// It closed, or its connection broke.
    Closed,
    Malformed(Malformed),
}

impl From<io::Error> for Leave {
    fn from(_: io::Error) -> Self {
        Self::Closed
    }
}

impl Client {
    fn new(stream: TcpStream, peer: SocketAddr) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, peer, greeted: false, decoder: Decoder::default(), out: Vec::new(), written: 0 })
    }

    /// Sends what the socket takes.
    fn flush(&mut self) -> Result<(), Leave> {
        while let Some(rest) = self.out.get(self.written..).filter(|rest| !rest.is_empty()) {
            match (&self.stream).write(rest) {
                Ok(0) => return Err(Leave::Closed),
                Ok(count) => self.written += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        self.written = 0;
        self.out.clear();
        if self.out.capacity() > 1 << 20 {
            self.out = Vec::new();
        }
        Ok(())
    }

    /// Answers all requests that are in, until one answer does not leave at once.
    fn answer(&mut self, id: ClientId, state: &mut State) -> Result<(), Leave> {
        while self.out.is_empty() {
            let Some(request) = self.decoder.next().map_err(Leave::Malformed)? else { break };
            if self.greeted {
                state.handle(id, request, &mut self.out).map_err(Leave::Malformed)?;
            } else if is_greeting(&request) {
                self.greeted = true;
            } else {
                return Err(Leave::Malformed(Malformed(format!("no VALIDATE at its start but {}", brief(&request)))));
            }
            self.flush()?;
        }
        Ok(())
    }

    /// Reads and answers for one turn.
    fn serve(&mut self, id: ClientId, state: &mut State, scratch: &mut [u8]) -> Result<(), Leave> {
        self.flush()?;
        self.answer(id, state)?;
        let mut turn = 0;
        while self.out.is_empty() && turn < TURN {
            match self.stream.read(scratch) {
                Ok(0) => return Err(Leave::Closed),
                Ok(count) => {
                    turn += count;
                    self.decoder.feed(scratch.get(..count).unwrap_or_default());
                    self.answer(id, state)?;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

fn brief(request: &Request) -> String {
    format!("{request:?}").chars().take(60).collect()
}

struct Service {
    listener: TcpListener,
    stopped: UnixStream,
    clients: BTreeMap<ClientId, Client>,
    max_clients: usize,
    next: ClientId,
    state: State,
    scratch: Vec<u8>,
    /// No connection is accepted before this: the process had no file descriptor left.
    pause: Option<Instant>,
}

impl Service {
    fn new(listener: TcpListener, stopped: UnixStream, max_clients: usize) -> Self {
        let (clients, state, scratch) = (BTreeMap::new(), State::default(), vec![0; 1 << 16]);
        Self { listener, stopped, clients, max_clients, next: 0, state, scratch, pause: None }
    }

    fn run(mut self) {
        loop {
            let Some((stop, accept, ready)) = self.poll() else { continue };
            for id in ready {
                self.serve(id);
            }
            if stop {
                // What clients had sent before the end is still carried out.
                self.accept();
                let all: Vec<ClientId> = self.clients.keys().copied().collect();
                all.into_iter().for_each(|id| self.serve(id));
                return;
            }
            if accept {
                self.accept();
            }
        }
    }

    /// Sleeps until something happens: whether to stop, whether somebody knocks, and who can be served.
    fn poll(&mut self) -> Option<(bool, bool, Vec<ClientId>)> {
        let mut fds = Vec::with_capacity(2 + self.clients.len());
        fds.push(PollFd::new(&self.stopped, PollFlags::IN));
        let knock = if self.pause.is_some() { PollFlags::empty() } else { PollFlags::IN };
        fds.push(PollFd::new(&self.listener, knock));
        for client in self.clients.values() {
            let waits_for = if client.out.is_empty() { PollFlags::IN } else { PollFlags::OUT };
            fds.push(PollFd::new(&client.stream, waits_for));
        }
        let timeout = self.pause.map(|until| until.saturating_duration_since(Instant::now()));
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        if let Err(errno) = poll(&mut fds, timeout.as_ref()) {
            if errno != rustix::io::Errno::INTR {
                log::error!("the store's server on {:?} cannot poll: {errno}", self.listener.local_addr());
                std::thread::sleep(Duration::from_millis(100));
            }
            return None;
        }
        let mut events = fds.iter().map(|fd| !fd.revents().is_empty());
        let stop = events.next().unwrap_or(false);
        let accept = events.next().unwrap_or(false);
        let ready = self.clients.keys().zip(events).filter(|(_, event)| *event).map(|(id, _)| *id).collect();
        drop(fds);
        self.pause.take_if(|until| *until <= Instant::now());
        Some((stop, accept, ready))
    }

    fn serve(&mut self, id: ClientId) {
        // Absent when it was closed earlier in this round.
        let Some(client) = self.clients.get_mut(&id) else { return };
        if let Err(leave) = client.serve(id, &mut self.state, &mut self.scratch) {
            self.close(id, leave);
        }
        for id in self.state.take_woken() {
            let Some(client) = self.clients.get_mut(&id) else { continue };
            client.out.push(READY);
            if let Err(leave) = client.flush() {
                self.close(id, leave);
            }
        }
    }

    fn close(&mut self, id: ClientId, leave: Leave) {
        self.state.forget(id);
        let Some(client) = self.clients.remove(&id) else { return };
        if let Leave::Malformed(reason) = leave {
            log::warn!("the store's server closes the connection of {}: {reason}", client.peer);
        }
    }

    fn accept(&mut self) {
        loop {
            match self.listener.accept() {
                Ok((stream, peer)) => {
                    if self.clients.len() >= self.max_clients {
                        log::warn!("the store's server turns {peer} away: it has {} clients", self.max_clients);
                    } else if let Ok(client) = Client::new(stream, peer) {
                        self.clients.insert(self.next, client);
                        self.next += 1;
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset) => {}
                Err(error) => {
                    // Out of file descriptors: those who knock wait in the queue meanwhile.
                    log::warn!("the store's server cannot accept a connection: {error}");
                    self.pause = Some(Instant::now() + Duration::from_millis(100));
                    return;
                }
            }
        }
    }
}
