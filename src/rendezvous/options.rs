use std::time::Duration;

/// How to find the other ranks.
#[derive(Clone, Debug)]
pub struct RendezvousOptions {
    /// Where, see [`InitMethod`](super::InitMethod).
    pub init_method: String,
    /// This process's rank; `None`: as the init method or the environment says.
    pub rank: Option<usize>,
    /// The number of ranks; `None`: as the init method or the environment says.
    pub world_size: Option<usize>,
    /// How long all of it may take, and afterwards each call of the store.
    pub timeout: Duration,
}

impl Default for RendezvousOptions {
    /// `env://` and 300 s, as PyTorch's stores.
    fn default() -> Self {
        Self { init_method: "env://".to_string(), rank: None, world_size: None, timeout: Duration::from_secs(300) }
    }
}
