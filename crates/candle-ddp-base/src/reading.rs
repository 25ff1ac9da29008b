//! What this process and the loopback device of its network namespace have used so far: for the measurements with very many
//! clients and nodes.
use std::time::{Duration, Instant};

/// Bytes, processor time and the time.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    bytes: u64,
    cpu: Duration,
    at: Instant,
}

impl Reading {
    /// What they have used until now. Zeros on systems without /proc.
    pub fn now() -> Self {
        let devices = std::fs::read_to_string("/proc/self/net/dev").unwrap_or_default();
        let line = devices.lines().find_map(|line| line.trim().strip_prefix("lo:"));
        let bytes = line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0);
        // User and system time of all threads, in hundredths of a second.
        let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
        let fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields).split_whitespace();
        let ticks: u64 = fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
        Self { bytes, cpu: Duration::from_millis(10 * ticks), at: Instant::now() }
    }

    /// The bytes since `before`.
    pub fn bytes_since(&self, before: &Self) -> f64 {
        self.bytes.saturating_sub(before.bytes) as f64
    }

    /// The milliseconds since `before`.
    pub fn ms_since(&self, before: &Self) -> f64 {
        (self.at - before.at).as_secs_f64() * 1e3
    }

    /// The milliseconds of processor time since `before`.
    pub fn cpu_ms_since(&self, before: &Self) -> f64 {
        self.cpu.saturating_sub(before.cpu).as_secs_f64() * 1e3
    }
}
