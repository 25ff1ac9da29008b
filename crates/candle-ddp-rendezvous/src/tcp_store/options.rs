use crate::Secret;
use candle_ddp_base::descriptors;
use std::time::Duration;

/// Options of [`TcpStore::connect_with`](super::TcpStore::connect_with).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TcpStoreOptions {
    /// How long connecting, and later each call, may take. Default: 300 s, like PyTorch's stores.
    pub timeout: Duration,
    /// The secret that this client and the server prove to each other. Default: none, for PyTorch's protocol.
    pub secret: Option<Secret>,
}

impl Default for TcpStoreOptions {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(300), secret: None }
    }
}

/// Options of a [`TcpStoreServer`](super::TcpStoreServer): who may use it, and its limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TcpStoreServerOptions {
    /// The secret that clients and this server prove to each other. Default: none; anyone who reaches the server can use
    /// it.
    pub secret: Option<Secret>,
    /// With a secret, whether clients without it are served as well, as long as none has proved that it knows it. They
    /// get separate keys, and never the job's. Then the server closes their connections and drops their keys. So a
    /// launcher can host a store before it knows whether its workers are PyTorch programs. Default: false; clients
    /// without the secret are refused.
    pub guests: bool,
    /// The maximum number of clients; further connections are refused. Default: 16,384, but at most three quarters of
    /// the process's file descriptor limit (`ulimit -n`), so that it can still open files and connect to its peers. The
    /// server raises the soft limit to the hard one, up to 65,536. A rank has about three connections.
    pub max_clients: usize,
    /// The maximum number of clients that have connected but neither sent VALIDATE nor, if there is a secret, proved that
    /// they know it; beyond it, the one that has been silent the longest is closed. Default: 512, but at most a quarter of
    /// `max_clients`. `ddprun` allows for the job's ranks, which may all come at once.
    pub max_ungreeted: usize,
    /// How long a client may take for that. Default: 10 s. Afterwards it may be idle for any time.
    pub greeting_timeout: Duration,
    /// The maximum size in bytes of keys and values, including old values that replies still refer to and keys that
    /// clients wait for. Default: 1 GiB. A client that tries to store more is closed. Guests have at most 64 MiB besides.
    pub max_stored: usize,
    /// The maximum size in bytes of unfinished requests and unread replies, without data that they share with the
    /// store. Default: 512 MiB. Beyond it, the client with the largest share is closed.
    pub max_pending: usize,
}

impl Default for TcpStoreServerOptions {
    fn default() -> Self {
        const CLIENTS: usize = 16_384;
        let max_clients = descriptors::limit().map_or(CLIENTS, |limit| (limit / 4 * 3).clamp(1, CLIENTS));
        Self {
            secret: None,
            guests: false,
            max_clients,
            max_ungreeted: (max_clients / 4).clamp(1, 512),
            greeting_timeout: Duration::from_secs(10),
            max_stored: 1 << 30,
            max_pending: 512 << 20,
        }
    }
}
