//! The GPUs of a node, as nvidia-smi lists them.
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Why the hardware has lowered a clock, under the names that nvidia-smi uses today and used before R535.
const REASONS: [&str; 2] = ["clocks_event_reasons", "clocks_throttle_reasons"];
/// How long it may take. Where a GPU hangs, it does as well.
const PATIENCE: Duration = Duration::from_secs(10);

/// A GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Gpu {
    pub(super) index: usize,
    pub(super) name: String,
    pub(super) driver: String,
    /// MiB.
    pub(super) memory: u64,
    pub(super) used: u64,
    /// °C; `None` if it does not say.
    pub(super) temperature: Option<u64>,
    /// The hardware has lowered its clock, because of heat or power.
    pub(super) is_slowed: bool,
    /// Errors of its memory since the driver was loaded that could not be corrected.
    pub(super) memory_errors: u64,
}

/// All GPUs; none where there is no driver. `Err` says why they cannot be listed.
pub(super) fn list() -> Result<Vec<Gpu>, String> {
    if !Path::new("/proc/driver/nvidia").exists() {
        return Ok(Vec::new());
    }
    let [new, old] = REASONS;
    ask(new).or_else(|_| ask(old))
}

/// The fields are those of [`Gpu`], in this order.
fn ask(reasons: &str) -> Result<Vec<Gpu>, String> {
    let fields = "index,name,driver_version,memory.total,memory.used,temperature.gpu";
    let query = format!("--query-gpu={fields},{reasons}.hw_slowdown,ecc.errors.uncorrected.volatile.total");
    let mut command = Command::new("nvidia-smi");
    command.args([&query, "--format=csv,noheader,nounits"]);
    let started = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
    let mut child = started.map_err(|error| format!("nvidia-smi cannot be started: {error}"))?;
    let begun = Instant::now();
    // Its output fits into a pipe.
    while child.try_wait().map_err(|error| format!("nvidia-smi: {error}"))?.is_none() {
        if begun.elapsed() >= PATIENCE {
            let _ = child.kill();
            return Err(format!("nvidia-smi has not answered within {} s", PATIENCE.as_secs()));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let output = child.wait_with_output().map_err(|error| format!("nvidia-smi: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    match output.status.success() {
        true => parse(&text),
        false => Err(format!("nvidia-smi failed: {}", text.lines().next().unwrap_or("it says nothing"))),
    }
}

fn parse(text: &str) -> Result<Vec<Gpu>, String> {
    let line = |line: &str| -> Option<Gpu> {
        let fields: Vec<&str> = line.split(',').map(str::trim).collect();
        let &[index, name, driver, memory, used, temperature, slowed, errors] = fields.as_slice() else { return None };
        Some(Gpu {
            index: index.parse().ok()?,
            name: name.to_string(),
            driver: driver.to_string(),
            memory: memory.parse().ok()?,
            used: used.parse().ok()?,
            temperature: temperature.parse().ok(),
            is_slowed: slowed == "Active",
            // `[N/A]` without ECC.
            memory_errors: errors.parse().unwrap_or(0),
        })
    };
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    lines.map(|text| line(text).ok_or_else(|| format!("nvidia-smi says {text:?}, which is unknown here"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_nvidia_smi() {
        let text = "0, NVIDIA H100 80GB HBM3, 580.95.05, 81559, 1, 27, Not Active, 0\n\
                    1, NVIDIA GeForce RTX 4060 Ti, 580.95.05, 16380, 512, [N/A], Active, [N/A]\n";
        let gpus = parse(text).unwrap();
        let [first, second] = &gpus[..] else { panic!("{gpus:?}") };
        assert_eq!((first.index, first.memory, first.temperature, first.is_slowed), (0, 81559, Some(27), false));
        assert_eq!((second.used, second.temperature, second.is_slowed, second.memory_errors), (512, None, true, 0));
        assert!(parse("No devices were found\n").unwrap_err().contains("No devices"));
    }
}
