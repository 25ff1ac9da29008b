//! The server's thread: moves bytes between its clients' sockets, the [decoders](super::protocol) and the
//! [state](super::state), and enforces the limits of every client.
use super::member::{Gate, Standing, stranger};
use super::options::TcpStoreServerOptions;
use super::output::Output;
use super::protocol::{Decoder, Malformed, READY};
use super::state::{ClientId, State};
use candle_ddp_base::deadline::deadline_after;
use candle_ddp_base::warnings::Warnings;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The maximum number of bytes read from or sent to one client before it is the turn of the others.
const TURN: usize = 1 << 20;
/// The number of connections that are accepted before clients get their turn: fewer than there are places, so that a client that
/// has sent something is heard in a flood.
const ACCEPTED: usize = 128;
/// The number that are accepted at the end.
const LAST: usize = 1024;
/// The maximum memory in bytes of requests of a client that has not been admitted. Until then, a client sends less than 100 bytes
/// at a time.
const STRANGER: usize = 1 << 10;
/// How long accepting pauses when the process has run out of file descriptors.
const PAUSE: Duration = Duration::from_millis(100);

struct Client {
    stream: TcpStream,
    peer: SocketAddr,
    standing: Standing,
    decoder: Decoder,
    out: Output,
    /// The memory that the client used after its last turn.
    held: usize,
}

/// Why a client is removed.
enum Leave {
    /// The client closed its connection, or the connection broke.
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
        let standing = Standing::Silent;
        Ok(Self { stream, peer, standing, decoder: Decoder::default(), out: Output::default(), held: 0 })
    }

    /// Sends as much as the socket accepts, up to one turn's share.
    fn flush(&mut self) -> Result<(), Leave> {
        let mut turn = 0;
        while !self.out.is_empty() && turn < TURN {
            match self.out.write_to(&mut &self.stream) {
                Ok(0) => return Err(Leave::Closed),
                Ok(count) => turn += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Executes all complete requests, until a reply cannot be sent at once.
    fn answer(&mut self, id: ClientId, keys: &mut Keys) -> Result<(), Leave> {
        while self.out.is_empty() {
            let Some(request) = self.decoder.next().map_err(Leave::Malformed)? else { break };
            match keys.gate.pass(&mut self.standing, request, &mut self.out) {
                Ok(Some(request)) => {
                    keys.of(self.standing).handle(id, request, &mut self.out).map_err(Leave::Malformed)?;
                }
                Ok(None) => {}
                Err(reason) => {
                    self.flush()?;
                    return Err(Leave::Malformed(reason));
                }
            }
            self.flush()?;
        }
        if !self.standing.is_admitted() && self.decoder.allocated() > STRANGER {
            return Err(Leave::Malformed(Malformed("it sent too much before it identified itself".to_string())));
        }
        Ok(())
    }

    /// Reads and replies for one turn.
    fn serve(&mut self, id: ClientId, keys: &mut Keys, scratch: &mut [u8]) -> Result<(), Leave> {
        self.flush()?;
        self.answer(id, keys)?;
        let mut turn = 0;
        while self.out.is_empty() && turn < TURN {
            match self.stream.read(scratch) {
                Ok(0) => return Err(Leave::Closed),
                Ok(count) => {
                    turn += count;
                    self.decoder.feed(scratch.get(..count).unwrap_or_default());
                    self.answer(id, keys)?;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// The keys of the job, and those of guests.
pub(super) struct Keys {
    pub(super) gate: Gate,
    pub(super) members: State,
    pub(super) guests: State,
}

impl Keys {
    fn of(&mut self, standing: Standing) -> &mut State {
        if standing == Standing::Guest { &mut self.guests } else { &mut self.members }
    }
}

pub(super) struct Service {
    listeners: Vec<TcpListener>,
    stopped: UnixStream,
    clients: BTreeMap<ClientId, Client>,
    /// The clients that have not been admitted and have offered no proof, oldest first, with their deadlines.
    silent: BTreeMap<ClientId, Instant>,
    /// Those that have: the proof of a member that is far away takes its time.
    offering: BTreeMap<ClientId, Instant>,
    /// The number of guests.
    guests: usize,
    /// The memory that all clients use.
    held: usize,
    options: TcpStoreServerOptions,
    next: ClientId,
    keys: Keys,
    /// Whether a client has proved that it knows the secret.
    is_joined: Arc<AtomicBool>,
    scratch: Vec<u8>,
    /// No connection is accepted before this time, because the process had no file descriptor left.
    pause: Option<Instant>,
    warnings: Warnings,
}

/// The results of a poll.
struct Events {
    stop: bool,
    accept: bool,
    ready: Vec<ClientId>,
}

impl Service {
    pub(super) fn new(
        listeners: Vec<TcpListener>,
        stopped: UnixStream,
        options: TcpStoreServerOptions,
        keys: Keys,
        is_joined: Arc<AtomicBool>,
    ) -> Self {
        Self {
            listeners,
            stopped,
            clients: BTreeMap::new(),
            silent: BTreeMap::new(),
            offering: BTreeMap::new(),
            guests: 0,
            held: 0,
            options,
            next: 0,
            keys,
            is_joined,
            scratch: vec![0; 1 << 16],
            pause: None,
            warnings: Warnings::new("the store's server"),
        }
    }

    pub(super) fn run(mut self) {
        loop {
            let Some(events) = self.poll() else { continue };
            for id in events.ready {
                self.serve(id);
            }
            if events.stop {
                // Requests that clients sent before the end are still executed.
                self.accept(LAST);
                let all: Vec<ClientId> = self.clients.keys().copied().collect();
                all.into_iter().for_each(|id| self.serve(id));
                return;
            }
            if events.accept {
                self.accept(ACCEPTED);
            }
            self.close_silent();
        }
    }

    /// Sleeps until something happens.
    fn poll(&mut self) -> Option<Events> {
        let mut fds = Vec::with_capacity(1 + self.listeners.len() + self.clients.len());
        fds.push(PollFd::new(&self.stopped, PollFlags::IN));
        let knock = if self.pause.is_some() { PollFlags::empty() } else { PollFlags::IN };
        fds.extend(self.listeners.iter().map(|listener| PollFd::new(listener, knock)));
        for client in self.clients.values() {
            let waits_for = if client.out.is_empty() { PollFlags::IN } else { PollFlags::OUT };
            fds.push(PollFd::new(&client.stream, waits_for));
        }
        let until = self.pause.into_iter().chain(self.longest().map(|(_, deadline)| deadline)).min();
        let timeout = until.map(|until| until.saturating_duration_since(Instant::now()));
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        if let Err(errno) = poll(&mut fds, timeout.as_ref()) {
            if errno != rustix::io::Errno::INTR {
                self.warnings.warn(format_args!("the store's server cannot poll: {errno}"));
                std::thread::sleep(PAUSE);
            }
            return None;
        }
        let mut events = fds.iter().map(|fd| !fd.revents().is_empty());
        let stop = events.next().unwrap_or(false);
        let accept = events.by_ref().take(self.listeners.len()).fold(false, |any, event| any | event);
        let ready = self.clients.keys().zip(events).filter(|(_, event)| *event).map(|(id, _)| *id).collect();
        drop(fds);
        self.pause.take_if(|until| *until <= Instant::now());
        Some(Events { stop, accept, ready })
    }

    fn serve(&mut self, id: ClientId) {
        // The client is absent if it was closed earlier in this round.
        let Some(client) = self.clients.get_mut(&id) else { return };
        let was_guest = client.standing == Standing::Guest;
        let served = client.serve(id, &mut self.keys, &mut self.scratch);
        if client.standing == Standing::Guest && !was_guest {
            self.guests += 1;
        }
        if let Err(leave) = served {
            self.close(id, leave);
        } else {
            let standing = client.standing;
            let held = client.decoder.allocated() + client.out.held();
            self.held = self.held - client.held + held;
            client.held = held;
            if standing.is_admitted() {
                self.forget(id);
            } else if let Standing::Challenged(_) = standing
                && let Some(deadline) = self.silent.remove(&id)
            {
                self.offering.insert(id, deadline);
            }
            let is_member = standing == Standing::Member;
            self.bound_memory();
            if is_member {
                self.close_guests();
            } else if self.guests + self.options.max_ungreeted > self.options.max_clients && !was_guest {
                self.bound_guests(id);
            }
        }
        self.wake();
    }

    /// Tells clients that their wait has ended. One that has gone may leave a last will, which ends the wait of others.
    fn wake(&mut self) {
        loop {
            let woken = self.keys.members.take_woken().into_iter().chain(self.keys.guests.take_woken());
            let woken: Vec<ClientId> = woken.collect();
            if woken.is_empty() {
                return;
            }
            for id in woken {
                let Some(client) = self.clients.get_mut(&id) else { continue };
                client.out.put(&[READY]);
                if let Err(leave) = client.flush() {
                    self.close(id, leave);
                }
            }
        }
    }

    fn bound_memory(&mut self) {
        while self.held > self.options.max_pending {
            let Some((id, client)) = self.clients.iter().max_by_key(|(_, client)| client.held) else { return };
            let (id, held) = (*id, client.held);
            let reason = format!(
                "unfinished requests and unread replies exceed {} bytes in total, and it has the largest share, {held}",
                self.options.max_pending
            );
            self.close(id, Leave::Malformed(Malformed(reason)));
        }
    }

    fn close(&mut self, id: ClientId, leave: Leave) {
        self.keys.members.leave(id);
        self.keys.guests.leave(id);
        self.forget(id);
        let Some(client) = self.clients.remove(&id) else { return };
        self.guests -= usize::from(client.standing == Standing::Guest);
        self.held -= client.held;
        if let Leave::Malformed(reason) = leave {
            self.warnings.warn(format_args!("the store's server closes the connection of {}: {reason}", client.peer));
        }
    }

    /// Closes a new guest if there are too many: room must remain for clients that may yet prove that they are members.
    fn bound_guests(&mut self, id: ClientId) {
        if self.clients.get(&id).is_some_and(|client| client.standing == Standing::Guest) {
            let reason = format!("there are {} other clients without the job's secret", self.guests - 1);
            self.close(id, Leave::Malformed(Malformed(reason)));
        }
    }

    /// Closes all guests, once there is a member.
    fn close_guests(&mut self) {
        if !self.keys.gate.guests {
            return;
        }
        self.keys.gate.guests = false;
        self.is_joined.store(true, Ordering::Relaxed);
        let is_guest = |(id, client): (&ClientId, &Client)| (client.standing == Standing::Guest).then_some(*id);
        let guests: Vec<ClientId> = self.clients.iter().filter_map(is_guest).collect();
        guests.into_iter().for_each(|id| self.close(id, Leave::Malformed(stranger())));
        self.keys.guests = State::new(0);
    }

    /// Removes a client from those that have not been admitted.
    fn forget(&mut self, id: ClientId) {
        self.silent.remove(&id);
        self.offering.remove(&id);
    }

    /// The number of clients that have not been admitted.
    fn ungreeted(&self) -> usize {
        self.silent.len() + self.offering.len()
    }

    /// Of the clients that have not been admitted, the oldest one of each kind, with its deadline.
    fn longest(&self) -> impl Iterator<Item = (ClientId, Instant)> + use<> {
        let first = |clients: &BTreeMap<ClientId, Instant>| clients.first_key_value().map(|(id, at)| (*id, *at));
        [first(&self.silent), first(&self.offering)].into_iter().flatten()
    }

    /// Closes clients that have not been admitted in time.
    fn close_silent(&mut self) {
        let now = Instant::now();
        while let Some((id, _)) = self.longest().find(|(_, deadline)| *deadline <= now) {
            let reason = format!("it did not identify itself within {:?}", self.options.greeting_timeout);
            self.close(id, Leave::Malformed(Malformed(reason)));
        }
    }

    /// Closes the client that has been silent the longest, unless it has sent data that was not read yet. If at most half of the
    /// places are taken by silent clients, it is the one whose offered proof has been missing the longest: neither kind of stranger
    /// takes all places.
    fn close_oldest_ungreeted(&mut self) {
        let before = self.ungreeted();
        while self.ungreeted() == before {
            let is_silent = self.offering.is_empty() || self.silent.len() > self.options.max_ungreeted.div_ceil(2);
            let of_kind = |service: &Self| {
                let clients = if is_silent { &service.silent } else { &service.offering };
                clients.keys().next().copied()
            };
            let Some(oldest) = of_kind(self) else { return };
            self.serve(oldest);
            if of_kind(self) == Some(oldest) {
                let reason = "it has not identified itself, and other clients want to connect".to_string();
                self.close(oldest, Leave::Malformed(Malformed(reason)));
            }
        }
    }

    fn accept(&mut self, most: usize) {
        for listener in 0..self.listeners.len() {
            for _ in 0..most {
                let Some(accepted) = self.listeners.get(listener).map(TcpListener::accept) else { break };
                match accepted {
                    Ok((stream, peer)) => self.admit(stream, peer),
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(error) if matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset) => {
                    }
                    Err(error) => {
                        // There are no file descriptors left; new connections wait in the listen queue.
                        let text = "the store's server cannot accept a connection";
                        self.warnings.warn(format_args!("{text}: {error}. Is `ulimit -n` too small for this job?"));
                        self.pause = Some(Instant::now() + PAUSE);
                        return;
                    }
                }
            }
        }
    }

    fn admit(&mut self, stream: TcpStream, peer: SocketAddr) {
        if self.clients.len() >= self.options.max_clients {
            self.close_oldest_ungreeted();
        }
        if self.clients.len() >= self.options.max_clients {
            self.warnings.warn(format_args!(
                "the store's server refuses {peer}: it has {} clients, its maximum, which `ulimit -n` also limits",
                self.options.max_clients
            ));
            return;
        }
        let Ok(client) = Client::new(stream, peer) else { return };
        let id = self.next;
        self.next += 1;
        self.clients.insert(id, client);
        self.silent.insert(id, deadline_after(self.options.greeting_timeout));
        // Ranks send VALIDATE as soon as they are connected, so most never count as silent.
        self.serve(id);
        if self.ungreeted() > self.options.max_ungreeted {
            self.close_oldest_ungreeted();
        }
    }
}
