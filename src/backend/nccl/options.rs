use std::time::Duration;

/// Options of an [`NcclCommunicator`](super::NcclCommunicator). They must be the same on all ranks. Those of NCCL itself, from
/// `min_ctas` on, are PyTorch's `ProcessGroupNCCL.Options.config`; NCCL's own variables, such as `NCCL_MAX_CTAS`, take precedence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NcclOptions {
    /// The time-out of the construction and of each later call. Default: 10 minutes, as in PyTorch's NCCL.
    pub timeout: Duration,
    /// A rank that sends no heartbeat for this long is considered dead, which ends the group. Default: 10 seconds on one host; on
    /// several hosts 30 seconds, and another second for every 16 ranks.
    pub lost_after: Option<Duration>,
    /// Whether the GPU starts collectives before kernels of the program that wait for a free multiprocessor at the same time. Otherwise
    /// an all-reduce waits until the running kernel has no more blocks to place, on every rank, and the last rank decides. Default:
    /// true (PyTorch's `is_high_priority_stream` is false).
    pub high_priority: bool,
    /// The least number of blocks of NCCL's kernels, each of which occupies a multiprocessor, except in `SyncBatchNorm`,
    /// [`with_grad`](crate::ProcessGroup::with_grad) and messages. More than 16 give the gathers of sharded blocks more than these.
    /// Default: NCCL chooses.
    pub min_ctas: Option<u32>,
    /// The greatest number of blocks of NCCL's kernels. Fewer leave more of the GPU to the backward pass. Default: NCCL chooses, within
    /// limits with which the kernels of all groups find room at once.
    pub max_ctas: Option<u32>,
    /// The size of the clusters of blocks, on GPUs that have them (compute capability 9.0). Default: NCCL chooses.
    pub cga_cluster_size: Option<u32>,
    /// The name of NCCL's network module, such as `IB` or `Socket`. Default: NCCL chooses.
    pub net_name: Option<String>,
    /// The traffic class of messages on InfiniBand or RoCE, for NCCL 2.26 or later. Default: NCCL chooses.
    pub traffic_class: Option<u32>,
}

impl Default for NcclOptions {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(600),
            lost_after: None,
            high_priority: true,
            min_ctas: None,
            max_ctas: None,
            cga_cluster_size: None,
            net_name: None,
            traffic_class: None,
        }
    }
}
