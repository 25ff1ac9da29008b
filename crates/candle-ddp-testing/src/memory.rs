//! The memory of this process.

/// Returns the peak memory of `work` in addition to the memory that this process already uses.
pub fn peak_memory<T>(work: impl FnOnce() -> T) -> u64 {
    let kilobytes = |field: &str| -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
        line.trim_start_matches(':').trim_end_matches("kB").trim().parse().unwrap()
    };
    let before = kilobytes("VmRSS");
    let result = work();
    let peak = kilobytes("VmHWM").saturating_sub(before) * 1024;
    drop(result);
    peak
}
