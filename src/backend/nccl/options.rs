use std::time::Duration;

/// Options of an [`NcclCommunicator`](super::NcclCommunicator). They must be the same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NcclOptions {
    /// The time-out of the construction and of each later call. Default: 10 minutes, as in PyTorch's NCCL.
    pub timeout: Duration,
    /// A rank that sends no heartbeat for this long is considered dead, which ends the group. Default: 10 seconds.
    pub lost_after: Duration,
}

impl Default for NcclOptions {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(600), lost_after: Duration::from_secs(10) }
    }
}
