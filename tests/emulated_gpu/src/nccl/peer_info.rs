//! Where a rank is, and the settings in the environment.
use std::sync::OnceLock;
use std::time::Duration;

/// NCCL's `ncclPeerInfo`: ranks with equal ones are on the same GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PeerInfo {
    pub(super) host: String,
    pub(super) device: i32,
    /// Whether several ranks may be on one GPU.
    pub(super) may_share: bool,
    /// The device as this process numbers it, whose work is waited for when memory is freed. `None` if there is none, in tests.
    pub(super) context: Option<i32>,
}

impl PeerInfo {
    /// Returns the info of the calling thread.
    pub(super) fn here() -> Self {
        #[cfg(test)]
        if let Some(info) = PRETENDED.with(|info| info.borrow().clone()) {
            return info;
        }
        let host = std::env::var("NCCL_HOSTID").unwrap_or_else(|_| machine());
        let may_share = std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|value| value == "1");
        Self { host, device: crate::driver::current_device(), may_share, context: crate::driver::context_device() }
    }
}

/// Returns an id of this machine, which stays the same until the machine restarts.
fn machine() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").map_or("machine".to_string(), |id| id.trim().to_string())
}

#[cfg(test)]
thread_local! {
    /// The info of ranks in tests, which are threads of one process.
    pub(super) static PRETENDED: std::cell::RefCell<Option<PeerInfo>> = const { std::cell::RefCell::new(None) };
}

/// The settings in the environment; see the README.
pub(super) struct Pretences {
    pub(super) delay: Duration,
    /// The number of the call that fails, from 1; 0 for none.
    pub(super) fail_after: u64,
    /// The code of all asynchronous errors, also one that no version of NCCL has.
    pub(super) fail_with: Option<i32>,
    /// Encoded like NCCL's versions.
    pub(super) version: i32,
    /// Whether launches of messages never end.
    pub(super) stuck: bool,
    /// Whether aborts never return.
    pub(super) stuck_aborts: bool,
    /// Whether all communicators are blocking, or nonblocking.
    pub(super) blocking: Option<bool>,
    /// The number of blocks of the kernels of all communicators.
    pub(super) max_ctas: Option<usize>,
    /// Whether data arrives damaged.
    pub(super) corrupt: bool,
    /// The communicator of this process, from 0, that ends by an abort after its finalization.
    pub(super) abort_at_end: Option<usize>,
}

pub(super) fn pretences() -> &'static Pretences {
    static PRETENCES: OnceLock<Pretences> = OnceLock::new();
    PRETENCES.get_or_init(|| Pretences {
        delay: Duration::from_millis(number("EMULATED_NCCL_DELAY_MS").unwrap_or(0)),
        fail_after: number("EMULATED_NCCL_FAIL_AFTER").unwrap_or(0),
        fail_with: number("EMULATED_NCCL_FAIL_WITH"),
        version: number("EMULATED_NCCL_VERSION").unwrap_or(22_707),
        stuck: std::env::var_os("EMULATED_NCCL_STUCK_MESSAGES").is_some(),
        stuck_aborts: std::env::var_os("EMULATED_NCCL_STUCK_ABORTS").is_some(),
        blocking: number("NCCL_COMM_BLOCKING").map(|blocking: i32| blocking == 1),
        max_ctas: number("NCCL_MAX_CTAS"),
        corrupt: std::env::var_os("EMULATED_NCCL_CORRUPT").is_some(),
        abort_at_end: number("EMULATED_NCCL_ABORT_AT_END"),
    })
}

fn number<T: std::str::FromStr>(name: &str) -> Option<T> {
    std::env::var(name).ok()?.parse().ok()
}
