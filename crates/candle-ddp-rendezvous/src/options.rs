use super::Secret;
use std::time::Duration;

/// Options of [`rendezvous`](super::rendezvous).
#[derive(Clone, Debug)]
pub struct RendezvousOptions {
    /// Where ranks rendezvous; see [`InitMethod`](super::InitMethod).
    pub init_method: String,
    /// The rank of this process; `None` takes it from the init method or the environment.
    pub rank: Option<usize>,
    /// The number of ranks; `None` takes it from the init method or the environment.
    pub world_size: Option<usize>,
    /// The time-out of the whole rendezvous, and later of each call of the store.
    pub timeout: Duration,
    /// The secret that ranks prove to each other and to the store; `None` takes it from the environment
    /// ([`Secret::from_env`]). Without one, anyone who reaches the store can use it.
    pub secret: Option<Secret>,
    /// Whether it is an error if the process was started without a launcher (`env://`, and none of its variables is
    /// set). Otherwise, the process is a world of one rank, and a warning says so.
    pub require_launcher: bool,
}

impl Default for RendezvousOptions {
    /// `env://` and 300 s, like PyTorch's stores.
    fn default() -> Self {
        let (init_method, timeout) = ("env://".to_string(), Duration::from_secs(300));
        Self { init_method, rank: None, world_size: None, timeout, secret: None, require_launcher: false }
    }
}
