use super::link::{ConnectError, Link, LinkError, connect};
use super::protocol::{MAX_KEY, MAX_VALUE, NOT_READY, READY, Request, WAIT_CANCELED, user_key};
use super::{TcpStoreOptions, TcpStoreServer};
use crate::store::CANCELLATION_CHECK;
use crate::{Error, Result};
use crate::{LastWill, Secret, Store};
use candle_ddp_base::deadline::deadline_after;
use candle_ddp_base::debug_fields;
use candle_ddp_base::descriptors::{SHORTAGE_HINT, is_shortage};
use candle_ddp_base::panic::lock;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The raw key to which every client adds 1. A PyTorch server that knows its world size waits for it.
const CLIENTS: &[u8] = b"init/";
/// The number of idle connections that are kept; further concurrent calls open their own.
const IDLE_LINKS: usize = 4;
/// The maximum number of keys in a request of this client: 128 MiB with keys of maximum length.
const KEYS_PER_REQUEST: usize = 16_384;
/// The approximate number of bytes of values in one request.
const BYTES_PER_REQUEST: usize = 8 << 20;
/// The time that a server has, in addition to a wait's own time-out, to confirm that it stopped waiting.
const CANCEL_GRACE: Duration = Duration::from_secs(2);

/// A client of a [`TcpStoreServer`], or of PyTorch's `TCPStore`; both see the same keys.
///
/// Threads may share it: a waiting call does not block the others, which use separate connections. When a call returns,
/// the server has executed it.
pub struct TcpStore {
    host: String,
    port: u16,
    address: SocketAddr,
    local: IpAddr,
    timeout: Duration,
    secret: Option<Secret>,
    /// The common deadline of all calls, if there is one.
    deadline: Option<Instant>,
    idle: Mutex<Vec<Link>>,
    /// Dropped last, after this client's own connections.
    server: Option<Arc<TcpStoreServer>>,
}

debug_fields!(TcpStore: host, port, timeout);

impl TcpStore {
    /// Connects to the server at `host`:`port` within `timeout`; the server may start later than this client. `timeout`
    /// also bounds each later call.
    ///
    /// This is PyTorch's protocol, which has no secrets; [`TcpStore::connect_with`] connects to the store of a job.
    ///
    /// # Errors
    /// Returns [`Error::Secret`] if the server requires a secret, and [`Error::StoreTimeout`] if there is no server.
    pub fn connect(host: &str, port: u16, timeout: Duration) -> Result<Self> {
        Self::connect_with(host, port, TcpStoreOptions { timeout, secret: None })
    }

    /// Like [`TcpStore::connect`], with options.
    ///
    /// # Errors
    /// Returns [`Error::Secret`] if the two ends do not have the same secret, or only one of them has one,
    /// [`Error::Store`] if this host has no route to that address, and [`Error::StoreTimeout`] if there is no server.
    pub fn connect_with(host: &str, port: u16, options: TcpStoreOptions) -> Result<Self> {
        Self::connect_for(host, port, options, "")
    }

    /// Like [`TcpStore::connect_with`], for a process that knows why it looks for a store: messages end with `why`.
    pub(crate) fn connect_for(host: &str, port: u16, options: TcpStoreOptions, why: &str) -> Result<Self> {
        let TcpStoreOptions { timeout, secret } = options;
        let operation = || "connect".to_string();
        let name = format!("{}:{port}", if host.contains(':') { format!("[{host}]") } else { host.to_string() });
        let deadline = deadline_after(timeout);
        let mut link = connect(host, port, secret.as_ref(), deadline, why).map_err(|error| match error {
            ConnectError::Timeout(last) => Error::StoreTimeout {
                operation: operation(),
                store: name.clone(),
                timeout,
                reason: format!(
                    "{last}. Rank 0 (or the launcher) hosts the store there: check that it is running, \
                     that its address and port are right (MASTER_ADDR and MASTER_PORT, or ddprun's options), and \
                     that no firewall blocks the connection{why}"
                ),
            },
            ConnectError::Protocol(reason) => Error::Store {
                operation: operation(),
                store: name.clone(),
                reason: format!("{reason}: a program other than a TCPStore uses this port"),
            },
            ConnectError::Unreachable(reason) => Error::Store { operation: operation(), store: name.clone(), reason },
            ConnectError::Refused(reason) => Error::Secret { operation: operation(), peer: name.clone(), reason },
        })?;
        let addresses = link.local_addr().and_then(|local| Ok((local, link.peer_addr()?)));
        let (local, address) = addresses.map_err(|error| Error::io(format!("connect to the store {name}"), error))?;
        let store = Self {
            host: host.to_string(),
            port,
            address,
            local: local.ip().to_canonical(),
            timeout,
            secret,
            deadline: None,
            idle: Mutex::default(),
            server: None,
        };
        let mut bytes = Vec::new();
        Request::Add { key: CLIENTS.to_vec(), amount: 1 }.encode(&mut bytes);
        let greeted = link.send(&bytes, deadline).and_then(|()| link.receive_i64(deadline));
        greeted.map_err(|error| store.error(&operation, timeout, error))?;
        lock(&store.idle).push(link);
        Ok(store)
    }

    /// Keeps `server` alive as long as this client.
    pub(crate) fn hosting(mut self, server: Arc<TcpStoreServer>) -> Self {
        self.server = Some(server);
        self
    }

    /// Returns the same store with a common `deadline` for all calls. It takes over the idle connections and closes
    /// them in the end.
    pub(crate) fn until(&self, deadline: Instant) -> Self {
        let idle = std::mem::take(&mut *lock(&self.idle));
        let Self { ref host, port, address, local, timeout, ref secret, ref server, .. } = *self;
        let (host, secret, server) = (host.clone(), secret.clone(), server.clone());
        Self { host, port, address, local, timeout, secret, deadline: Some(deadline), idle: Mutex::new(idle), server }
    }

    /// Returns another client of the same store, whose calls may take `timeout` each.
    pub(super) fn alone(&self, timeout: Duration) -> Self {
        let Self { ref host, port, address, local, ref secret, .. } = *self;
        let (host, secret) = (host.clone(), secret.clone());
        Self { host, port, address, local, timeout, secret, deadline: None, idle: Mutex::default(), server: None }
    }

    /// Uses another host name for the store in messages.
    pub(crate) fn named(mut self, host: &str) -> Self {
        self.host = host.to_string();
        self
    }

    /// Returns the local address of the connection, at which peers that reach the server can most likely reach this
    /// process.
    pub fn local_addr(&self) -> IpAddr {
        self.local
    }

    /// Returns the address of the server.
    pub fn server_addr(&self) -> SocketAddr {
        SocketAddr::new(self.address.ip().to_canonical(), self.address.port())
    }

    /// Returns `host:port`, for messages.
    #[doc(hidden)]
    pub fn name(&self) -> String {
        match self.host.contains(':') {
            true => format!("[{}]:{}", self.host, self.port),
            false => format!("{}:{}", self.host, self.port),
        }
    }

    fn error(&self, operation: &dyn Fn() -> String, timeout: Duration, error: LinkError) -> Error {
        let (operation, store) = (operation(), self.name());
        match error {
            LinkError::Timeout => {
                let reason = "the server does not answer: the network between this host and that of the store has failed, or the \
                              process that hosts it (rank 0, or the launcher) is stopped";
                Error::StoreTimeout { operation, store, timeout, reason: reason.to_string() }
            }
            LinkError::Protocol(reason) => Error::Store { operation, store, reason },
            LinkError::Refused(reason) => Error::Secret { operation, peer: store, reason },
            LinkError::Closed(error) if is_shortage(&error) => {
                Error::io(format!("{operation} on the store {store} ({SHORTAGE_HINT})"), error)
            }
            LinkError::Closed(error) => {
                // A server that is still alive closes a connection only if it refuses the request.
                let alive = Link::open(self.address, self.secret.as_ref(), Instant::now() + CANCEL_GRACE.min(timeout));
                let reason = match alive {
                    Err(LinkError::Refused(reason)) => return Error::Secret { operation, peer: store, reason },
                    Ok(_) => format!(
                        "the server refused the request and closed the connection ({error}): a counter's key does not \
                         hold a number, or the store is full. A warning in the log of the process that hosts it (rank \
                         0, or the launcher) says which"
                    ),
                    Err(_) => format!(
                        "the server is gone ({error}): the process that hosts it (rank 0, or the launcher) has ended. \
                         Look for the first error in its output"
                    ),
                };
                Error::Store { operation, store, reason }
            }
        }
    }

    /// Runs `body` on its own connection, with the deadline of the call.
    fn call<T>(
        &self,
        operation: &dyn Fn() -> String,
        timeout: Duration,
        body: impl FnOnce(&mut Link, Instant) -> Result<T, LinkError>,
    ) -> Result<T> {
        let deadline = deadline_after(timeout);
        let deadline = self.deadline.map_or(deadline, |end| end.min(deadline));
        let idle = lock(&self.idle).pop();
        let link = idle.map_or_else(|| Link::open(self.address, self.secret.as_ref(), deadline), Ok);
        let done = link.and_then(|mut link| Ok((body(&mut link, deadline)?, link)));
        // A connection that had an error is not reused, because a reply may still arrive on it.
        let (result, link) = done.map_err(|error| self.error(operation, timeout, error))?;
        let mut idle = lock(&self.idle);
        if idle.len() < IDLE_LINKS {
            idle.push(link);
        }
        Ok(result)
    }

    /// Sends a request and reads its reply with `receive`.
    pub(super) fn ask<T>(
        &self,
        operation: &dyn Fn() -> String,
        request: &Request,
        receive: impl FnOnce(&mut Link, Instant) -> Result<T, LinkError>,
    ) -> Result<T> {
        self.call(operation, self.timeout, |link, deadline| {
            let mut bytes = Vec::new();
            request.encode(&mut bytes);
            link.send(&bytes, deadline)?;
            receive(link, deadline)
        })
    }

    /// Sends a request that has no reply.
    pub(super) fn tell(&self, operation: &dyn Fn() -> String, request: &Request) -> Result<()> {
        self.call(operation, self.timeout, |link, deadline| {
            let mut bytes = Vec::new();
            request.encode(&mut bytes);
            link.ping(bytes, deadline)
        })
    }

    pub(super) fn key(&self, operation: &str, key: &str) -> Result<Vec<u8>> {
        let raw = user_key(key);
        self.within(operation, key, "key", raw.len(), MAX_KEY)?;
        Ok(raw)
    }

    fn keys(&self, operation: &str, keys: &[&str]) -> Result<Vec<Vec<u8>>> {
        keys.iter().map(|key| self.key(operation, key)).collect()
    }

    pub(super) fn value(&self, operation: &str, key: &str, value: &[u8]) -> Result<Vec<u8>> {
        self.within(operation, key, "value", value.len(), MAX_VALUE)?;
        Ok(value.to_vec())
    }

    fn within(&self, operation: &str, key: &str, what: &str, length: usize, limit: usize) -> Result<()> {
        if length > limit {
            let key: String = key.chars().take(64).collect();
            let reason = format!("the {what} has {length} bytes, but a store accepts at most {limit}");
            return Err(Error::Store { operation: format!("{operation}({key:?})"), store: self.name(), reason });
        }
        Ok(())
    }

    /// Describes which of `keys` are not set, up to a few, if the server says so.
    fn missing(&self, keys: &[&str]) -> String {
        let answers = keys.iter().take(256).map_while(|key| Some((*key, self.check(&[*key]).ok()?)));
        let missing: Vec<&str> = answers.filter(|(_, is_set)| !is_set).map(|(key, _)| key).take(8).collect();
        match missing.is_empty() {
            true => "not all of them were set, and the server did not say which".to_string(),
            false => format!("no rank set {missing:?}"),
        }
    }
}

fn named<'a>(operation: &'a str, keys: &'a [&str]) -> impl Fn() -> String + 'a {
    move || match keys {
        [key] => format!("{operation}({key:?})"),
        keys if keys.len() <= 8 => format!("{operation}({keys:?})"),
        keys => format!("{operation}({:?} and {} more)", keys.get(..8).unwrap_or_default(), keys.len() - 8),
    }
}

/// The outcome of a wait.
enum Waited {
    Ready,
    Expired,
}

/// Waits, and on expiry asks the server to stop waiting, so that the connection stays usable.
fn wait(
    link: &mut Link,
    request: &Request,
    deadline: Instant,
    mut is_cancelled: impl FnMut() -> bool,
) -> Result<Waited, LinkError> {
    let mut bytes = Vec::new();
    request.encode(&mut bytes);
    link.send(&bytes, deadline)?;
    let received = loop {
        // The reply is a single byte, so no part of it is lost between two polls.
        match link.receive(deadline.min(Instant::now() + CANCELLATION_CHECK)) {
            Err(LinkError::Timeout) if Instant::now() < deadline && !is_cancelled() => {}
            received => break received,
        }
    };
    let answer = match received {
        Ok([answer]) => answer,
        Err(LinkError::Timeout) => {
            let deadline = Instant::now() + CANCEL_GRACE;
            let mut bytes = Vec::new();
            Request::CancelWait.encode(&mut bytes);
            link.send(&bytes, deadline)?;
            match link.receive(deadline)? {
                [WAIT_CANCELED] => return Ok(Waited::Expired),
                // The keys were set while the cancellation was under way.
                [answer] => match link.receive(deadline)? {
                    [WAIT_CANCELED] => answer,
                    [other] => return Err(unexpected("CANCEL_WAIT", other)),
                },
            }
        }
        Err(error) => return Err(error),
    };
    if answer == READY { Ok(Waited::Ready) } else { Err(unexpected("WAIT", answer)) }
}

fn unexpected(request: &str, answer: u8) -> LinkError {
    LinkError::Protocol(format!("unexpected reply {answer:#04x} to {request}"))
}

impl Store for TcpStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let request = Request::Set { key: self.key("set", key)?, value: self.value("set", key, value)? };
        self.tell(&named("set", &[key]), &request)
    }

    fn get(&self, key: &str) -> Result<Vec<u8>> {
        let request = Request::Get(self.key("get", key)?);
        self.wait(&[key], None)?;
        self.ask(&named("get", &[key]), &request, Link::receive_bytes)
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        let request = Request::Add { key: self.key("add", key)?, amount };
        self.ask(&named("add", &[key]), &request, Link::receive_i64)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        let operation = "compare_set";
        let request = Request::CompareSet {
            key: self.key(operation, key)?,
            expected: self.value(operation, key, expected)?,
            desired: self.value(operation, key, desired)?,
        };
        self.ask(&named(operation, &[key]), &request, Link::receive_bytes)
    }

    fn wait(&self, keys: &[&str], timeout: Option<Duration>) -> Result<()> {
        self.wait_cancellable(keys, timeout, &|| Ok(()))
    }

    fn wait_cancellable(
        &self,
        keys: &[&str],
        timeout: Option<Duration>,
        cancelled: &dyn Fn() -> Result<()>,
    ) -> Result<()> {
        cancelled()?;
        let timeout = timeout.unwrap_or(self.timeout);
        let start = Instant::now();
        for keys in keys.chunks(KEYS_PER_REQUEST) {
            let request = Request::Wait(self.keys("wait", keys)?);
            let left = timeout.saturating_sub(start.elapsed()).max(Duration::from_millis(1));
            let operation = named("wait", keys);
            let mut cancellation = None;
            let mut is_cancelled = || {
                cancellation = cancelled().err();
                cancellation.is_some()
            };
            let waited =
                self.call(&operation, left, |link, deadline| wait(link, &request, deadline, &mut is_cancelled))?;
            if let Some(error) = cancellation {
                return Err(error);
            }
            if let Waited::Expired = waited {
                let reason = self.missing(keys);
                return Err(Error::StoreTimeout { operation: operation(), store: self.name(), timeout, reason });
            }
        }
        Ok(())
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        for keys in keys.chunks(KEYS_PER_REQUEST) {
            let request = Request::Check(self.keys("check", keys)?);
            let ready =
                self.ask(&named("check", keys), &request, |link, deadline| match link.receive(deadline)? {
                    [READY] => Ok(true),
                    [NOT_READY] => Ok(false),
                    [answer] => Err(unexpected("CHECK", answer)),
                })?;
            if !ready {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn delete(&self, key: &str) -> Result<bool> {
        let request = Request::Delete(self.key("delete", key)?);
        self.ask(&named("delete", &[key]), &request, Link::receive_i64).map(|count| count > 0)
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        let request = Request::Append { key: self.key("append", key)?, value: self.value("append", key, value)? };
        self.tell(&named("append", &[key]), &request)
    }

    fn multi_get(&self, keys: &[&str]) -> Result<Vec<Vec<u8>>> {
        self.wait(keys, None)?;
        let mut values = Vec::with_capacity(keys.len());
        for keys in keys.chunks(KEYS_PER_REQUEST) {
            let request = Request::MultiGet(self.keys("multi_get", keys)?);
            self.ask(&named("multi_get", keys), &request, |link, deadline| {
                for _ in keys {
                    values.push(link.receive_bytes(deadline)?);
                }
                Ok(())
            })?;
        }
        Ok(values)
    }

    /// Sets every key of `pairs`, in several requests if there are many or large ones.
    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        let operation = "multi_set";
        let mut pairs = pairs.iter().copied().peekable();
        while pairs.peek().is_some() {
            let (mut batch, mut names, mut size) = (Vec::new(), Vec::new(), 0);
            while let Some((key, value)) = pairs.next_if(|_| size < BYTES_PER_REQUEST && batch.len() < KEYS_PER_REQUEST)
            {
                size += value.len();
                names.push(key);
                batch.push((self.key(operation, key)?, self.value(operation, key, value)?));
            }
            self.tell(&named(operation, &names), &Request::MultiSet(batch))?;
        }
        Ok(())
    }

    /// Counts all keys of the server, including the one that counts its clients.
    fn num_keys(&self) -> Result<usize> {
        let count = self.ask(&|| "num_keys".to_string(), &Request::NumKeys, Link::receive_i64)?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    fn last_will(&self, key: &str, value: &[u8]) -> Result<Option<LastWill>> {
        self.leave_will(key, value)
    }

    fn is_hosted_here(&self) -> bool {
        self.server.is_some()
    }

    fn timeout(&self) -> Duration {
        self.timeout
    }
}
