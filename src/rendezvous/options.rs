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
}

impl Default for RendezvousOptions {
    /// `env://` and 300 s, like PyTorch's stores.
    fn default() -> Self {
        Self { init_method: "env://".to_string(), rank: None, world_size: None, timeout: Duration::from_secs(300) }
    }
}
