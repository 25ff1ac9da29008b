//! Where a rank is, and what the environment says.
use std::sync::OnceLock;
use std::time::Duration;

/// Ranks that are equal in it are on one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) host: String,
    pub(super) device: i32,
    /// Whether several ranks may be on one GPU.
    pub(super) may_share: bool,
}

impl Place {
    /// That of the calling thread.
    pub(super) fn here() -> Self {
        #[cfg(test)]
        if let Some(place) = PRETENDED.with(|place| place.borrow().clone()) {
            return place;
        }
        let host = std::env::var("NCCL_HOSTID").unwrap_or_else(|_| machine());
        let may_share = std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|value| value == "1");
        Self { host, device: crate::driver::current_device(), may_share }
    }
}

/// Tells this machine from others as long as it runs.
fn machine() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").map_or("machine".to_string(), |id| id.trim().to_string())
}

#[cfg(test)]
thread_local! {
    /// Where the ranks of tests are, which are threads of one process.
    pub(super) static PRETENDED: std::cell::RefCell<Option<Place>> = const { std::cell::RefCell::new(None) };
}

/// Faults to be injected, see the README.
pub(super) struct Faults {
    pub(super) delay: Duration,
    /// The number of the call that fails, from 1; 0 for none.
    pub(super) fail_after: u64,
}

pub(super) fn faults() -> &'static Faults {
    static FAULTS: OnceLock<Faults> = OnceLock::new();
    let number = |name| std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(0);
    FAULTS.get_or_init(|| Faults {
        delay: Duration::from_millis(number("EMULATED_NCCL_DELAY_MS")),
        fail_after: number("EMULATED_NCCL_FAIL_AFTER"),
    })
}
