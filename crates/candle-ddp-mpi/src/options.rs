use std::time::Duration;

/// Options of an [`MpiCommunicator`](crate::MpiCommunicator) and of [`init_process_group`](crate::init_process_group).
/// They must be the same on all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MpiOptions {
    /// How long a call may take. Default: 10 minutes.
    pub timeout: Duration,
    /// Reductions of more than this many bytes are made in pieces of this size, two of which are in flight at a time, so
    /// that a piece stays in the processor's caches. Default: 1 MiB.
    pub piece_bytes: usize,
    /// For [`init_process_group`](crate::init_process_group): the name or address of rank 0's host, where the ranks'
    /// store is. Default: `MASTER_ADDR`; otherwise the loopback address if all ranks are on one host, or else the name
    /// of the host.
    pub address: Option<String>,
    /// For [`init_process_group`](crate::init_process_group): see
    /// [`InitOptions::virtual_ranks`](candle_ddp::InitOptions::virtual_ranks). Default: None.
    pub virtual_ranks: Option<usize>,
}

impl Default for MpiOptions {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(600), piece_bytes: 1 << 20, address: None, virtual_ranks: None }
    }
}
