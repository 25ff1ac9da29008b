use rustix::process::{Resource, getrlimit};
use std::time::Duration;

/// The bounds of a [`TcpStoreServer`](super::TcpStoreServer).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TcpStoreServerOptions {
    /// The most clients at a time; one more is turned away. By default 16,384, but at most three quarters of the file
    /// descriptors that the process may have (`ulimit -n`), so that it can still open files and connect to its peers.
    pub max_clients: usize,
    /// The most clients that have connected and not said VALIDATE yet: beyond it the oldest one is closed. By default
    /// 128, and at most a quarter of `max_clients`.
    pub max_ungreeted: usize,
    /// How long a client may take to say VALIDATE: 10 s by default. Afterwards it may be idle as long as it likes.
    pub greeting_timeout: Duration,
    /// The most bytes of keys and values, together with those of answers that were overwritten since and of the keys
    /// that clients wait for: 1 GiB by default. A client that wants to store more is closed.
    pub max_stored: usize,
    /// The most bytes of unfinished requests and unread answers, beyond what they share with the store: 512 MiB by
    /// default. Where it is exceeded, the client that takes the most is closed.
    pub max_pending: usize,
}

impl Default for TcpStoreServerOptions {
    fn default() -> Self {
        const CLIENTS: usize = 16_384;
        let descriptors = getrlimit(Resource::Nofile).current.and_then(|limit| usize::try_from(limit).ok());
        let max_clients = descriptors.map_or(CLIENTS, |limit| (limit / 4 * 3).clamp(1, CLIENTS));
        Self {
            max_clients,
            max_ungreeted: (max_clients / 4).clamp(1, 128),
            greeting_timeout: Duration::from_secs(10),
            max_stored: 1 << 30,
            max_pending: 512 << 20,
        }
    }
}
