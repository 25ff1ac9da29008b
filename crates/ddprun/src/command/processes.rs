//! The number of workers per machine: a number, or one per core or GPU.
use crate::error::{Result, refuse};
use candle_ddp_env::PROCESS;
use std::num::NonZeroUsize;
use std::str::FromStr;

/// A value of `--nproc-per-node`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Processes {
    /// A fixed number.
    Count(NonZeroUsize),
    /// One per GPU if there is one, otherwise one per core.
    Auto,
    /// One per core that this process may run on.
    Cpu,
    /// One per GPU; an error if there is none.
    Gpu,
}

impl FromStr for Processes {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text.trim() {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "gpu" => Ok(Self::Gpu),
            number => {
                number.parse().map(Self::Count).map_err(|_| "expected a positive number, auto, cpu or gpu".into())
            }
        }
    }
}

/// The resources of a machine, which determine the number of workers and of their threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Host {
    /// The number of cores that this process may run on.
    pub(crate) cores: usize,
    /// The number of GPUs that programs started from here see.
    pub(crate) gpus: usize,
}

impl Host {
    /// Detects this machine's resources: cores by affinity and control group, GPUs by CUDA_VISIBLE_DEVICES or, if that
    /// is not set, by the NVIDIA driver's list.
    pub(crate) fn detect() -> Self {
        let gpus = match PROCESS.raw("CUDA_VISIBLE_DEVICES") {
            Some(list) => visible_devices(&list),
            None => std::fs::read_dir("/proc/driver/nvidia/gpus").map_or(0, |entries| entries.flatten().count()),
        };
        Self { cores: std::thread::available_parallelism().map_or(1, NonZeroUsize::get), gpus }
    }

    /// Returns the number of workers that `processes` means on this machine.
    pub(crate) fn count(&self, processes: Processes) -> Result<usize> {
        match processes {
            Processes::Count(count) => Ok(count.get()),
            Processes::Gpu if self.gpus == 0 => {
                let advice = "check nvidia-smi and CUDA_VISIBLE_DEVICES, or use `cpu`, `auto` or a number";
                refuse("--nproc-per-node gpu", format!("no GPU is visible here: {advice}"))
            }
            Processes::Gpu => Ok(self.gpus),
            Processes::Auto if self.gpus > 0 => Ok(self.gpus),
            Processes::Auto | Processes::Cpu => Ok(self.cores),
        }
    }

    /// Returns the number of threads for each of `processes` workers, so that together they use every core once.
    pub(crate) fn threads_each(&self, processes: usize) -> usize {
        (self.cores / processes.max(1)).max(1)
    }
}

/// Returns the number of devices that a value of CUDA_VISIBLE_DEVICES makes visible. CUDA stops at the first invalid
/// entry.
fn visible_devices(list: &str) -> usize {
    let valid = |entry: &&str| entry.parse::<u32>().is_ok() || entry.starts_with("GPU-") || entry.starts_with("MIG-");
    list.split(',').map(str::trim).take_while(valid).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_words() {
        assert_eq!("3".parse(), Ok(Processes::Count(NonZeroUsize::new(3).unwrap())));
        assert_eq!("gpu".parse(), Ok(Processes::Gpu));
        assert_eq!(" 3 ".parse(), "3".parse::<Processes>());
        for wrong in ["0", "-1", "two", "", " ", "99999999999999999999"] {
            assert!(wrong.parse::<Processes>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn auto_prefers_gpus_and_gpu_needs_one() {
        let with = Host { cores: 16, gpus: 4 };
        let without = Host { cores: 16, gpus: 0 };
        assert_eq!(with.count(Processes::Auto).unwrap(), 4);
        assert_eq!(without.count(Processes::Auto).unwrap(), 16);
        assert_eq!(with.count(Processes::Cpu).unwrap(), 16);
        let error = without.count(Processes::Gpu).unwrap_err().to_string();
        assert!(error.contains("CUDA_VISIBLE_DEVICES"), "{error}");
    }

    #[test]
    fn threads_share_the_cores() {
        let host = Host { cores: 10, gpus: 0 };
        assert_eq!([1, 3, 10, 11].map(|n| host.threads_each(n)), [10, 3, 1, 1]);
    }

    #[test]
    fn visible_devices_end_at_the_first_invalid_one() {
        assert_eq!(
            ["", "0", "0,2, 3", "0,-1,1", "-1", "GPU-8932f937,MIG-4a", "NoDevFiles"].map(visible_devices),
            [0, 1, 3, 1, 0, 2, 0]
        );
    }
}
