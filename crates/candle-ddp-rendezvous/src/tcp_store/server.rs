use super::address::loopback;
use super::listen::{all_interfaces, listen};
use super::member::Gate;
use super::options::TcpStoreServerOptions;
use super::service::{Keys, Service};
use super::state::State;
use crate::{Error, Result};
use candle_ddp_base::debug_fields;
use candle_ddp_base::{descriptors, thread};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread::JoinHandle;

/// The most bytes of keys and values of guests, who may be anybody.
const GUESTS: usize = 64 << 20;

/// A server for clients of the types [`TcpStore`](super::TcpStore) and PyTorch's `TCPStore`.
///
/// A single thread serves all clients and sleeps while there is nothing to do. It never blocks on a client: it does not
/// read from a client that does not read its replies. A client that sends malformed data or exceeds a limit is closed,
/// with a warning in the log. The limits are PyTorch's (keys of 8192 bytes, values of 8 MiB, 131,072 keys in a
/// request), 256 MiB per message, a million keys in the store, and those of [`TcpStoreServerOptions`]. So by default
/// the server uses at most about 1.6 GiB, whatever its clients do. Dropping the server closes every connection and ends
/// the thread.
///
/// With [`TcpStoreServerOptions::secret`], clients and the server prove to each other that they know it, and nobody else
/// can read or write the job's keys. Without, it is as in PyTorch: anyone who reaches the port can. Keep it inside the
/// cluster in any case, since nothing is encrypted, and give [`TcpStoreServer::bind`] the address at which the
/// ranks reach it instead of listening on all interfaces.
pub struct TcpStoreServer {
    addresses: Vec<SocketAddr>,
    /// Closing this end stops the thread.
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
    is_joined: Arc<AtomicBool>,
}

impl TcpStoreServer {
    /// Listens on `address`, such as `(Ipv4Addr::LOCALHOST, 29500)`. `Ipv6Addr::UNSPECIFIED` means all interfaces, IPv6 and IPv4, and
    /// port 0 any free port.
    pub fn bind(address: impl Into<SocketAddr>, options: TcpStoreServerOptions) -> Result<Self> {
        Self::serve(&[address.into()], options, &[])
    }

    /// Listens on all of `addresses`, which have the same port, and starts with the keys of `pairs`.
    pub(crate) fn serve(
        addresses: &[SocketAddr],
        options: TcpStoreServerOptions,
        pairs: &[(&str, &str)],
    ) -> Result<Self> {
        descriptors::raise_limit();
        let listeners = listen(addresses)?;
        let context = || "cannot host the store";
        let addresses: std::io::Result<Vec<_>> = listeners.iter().map(TcpListener::local_addr).collect();
        let addresses = addresses.map_err(|error| Error::io(context(), error))?;
        let (stop, stopped) = UnixStream::pair().map_err(|error| Error::io(context(), error))?;
        let mut members = State::new(options.max_stored);
        for (key, value) in pairs {
            let set = members.set(super::protocol::user_key(key), value.as_bytes().to_vec());
            set.map_err(|error| Error::invalid("run_id", error.0))?;
        }
        let guests = options.guests && options.secret.is_some();
        let gate = Gate { secret: options.secret.clone(), guests };
        // The first keys of the job are not for strangers.
        let keys = Keys { gate, members, guests: State::new(if guests { options.max_stored.min(GUESTS) } else { 0 }) };
        let is_joined = Arc::new(AtomicBool::new(!guests));
        let joined = Arc::clone(&is_joined);
        let serve = move || Service::new(listeners, stopped, options, keys, joined).run();
        let thread = thread::spawn("candle-ddp-store", serve)?;
        Ok(Self { addresses, stop: Some(stop), thread: Some(thread), is_joined })
    }

    /// Returns the port.
    pub fn port(&self) -> u16 {
        self.local_addr().port()
    }

    /// Returns the address and port on which it listens; the first one if there are several. The address may be
    /// unspecified.
    pub fn local_addr(&self) -> SocketAddr {
        self.addresses.first().copied().unwrap_or(all_interfaces(0))
    }

    /// Returns whether it listens on one of `addresses`.
    pub(crate) fn listens_on(&self, addresses: &[SocketAddr]) -> bool {
        addresses.iter().any(|address| {
            let same = |own: &SocketAddr| {
                own.port() == address.port() && (own.ip() == address.ip() || own.ip().is_unspecified())
            };
            self.addresses.iter().any(same)
        })
    }
}

#[doc(hidden)]
impl TcpStoreServer {
    /// Whether the store may be in use by the job, for longer than this server lives: a client has proved that it knows the secret, or
    /// there are no guests.
    pub fn joined(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.is_joined)
    }

    /// Returns an address at which this process reaches the server; if possible, the one that other hosts use as well.
    pub fn own_host(&self) -> String {
        let is_wide = |address: &&SocketAddr| match address {
            SocketAddr::V6(address) if address.scope_id() != 0 => false,
            address => !address.ip().is_loopback(),
        };
        let first = self.addresses.iter().find(is_wide);
        match first.copied().unwrap_or(self.local_addr()) {
            address if address.ip().is_unspecified() => loopback().to_string(),
            // A link-local address is only valid with its interface.
            SocketAddr::V6(address) if address.scope_id() != 0 => format!("{}%{}", address.ip(), address.scope_id()),
            address => address.ip().to_string(),
        }
    }
}

impl Drop for TcpStoreServer {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // The thread cannot panic; if it did, there would be no one to report to.
            let _ = thread.join();
        }
    }
}

debug_fields!(TcpStoreServer: addresses);
