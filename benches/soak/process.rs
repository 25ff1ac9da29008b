//! The resources that this process uses.
use std::fmt;

#[derive(Clone, Copy)]
pub(crate) struct Usage {
    /// Resident memory; shared memory counts as well.
    pub(crate) bytes: f64,
    pub(crate) descriptors: f64,
    pub(crate) threads: f64,
}

impl Usage {
    /// From /proc; zeros on systems that have none.
    pub(crate) fn now() -> Self {
        let count = |folder: &str| std::fs::read_dir(folder).map_or(0, Iterator::count) as f64;
        Self { bytes: resident("self"), descriptors: count("/proc/self/fd"), threads: count("/proc/self/task") }
    }

    /// Whether this is no more than `first`, but for memory that the allocator keeps.
    pub(crate) fn is_like(&self, first: &Self) -> bool {
        /// The memory for one call with the largest tensors, and for the comparison of its results.
        const LARGEST_CALL: f64 = (128 << 20) as f64;
        self.bytes <= first.bytes + LARGEST_CALL
            && self.descriptors <= first.descriptors
            && self.threads <= first.threads
    }
}

/// The resident memory of a process, in bytes.
pub(crate) fn resident(process: &str) -> f64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.split_whitespace().next());
    resident.and_then(|kib| kib.parse().ok()).unwrap_or(0.) * 1024.
}

/// As cells of a table.
impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bytes, descriptors, threads } = self;
        write!(f, "{:.1} | {descriptors} | {threads}", bytes / f64::from(1 << 20))
    }
}
