//! Chooses a rank's GPU.
use crate::warnings::warn_aloud;
use crate::{Error, Result, rendezvous};
use candle_core::{Device, DeviceLocation};
use candle_ddp_env::PROCESS;
use cudarc::driver::CudaContext;
use std::sync::Once;

/// Allows several ranks on one GPU, for tests on a machine that has only one.
const ALLOW_SHARED: &str = "CANDLE_DDP_ALLOW_SHARED_GPU";
/// NCCL's own variable for the same purpose, from 2.30 on.
const NCCL_ALLOW_SHARED: &str = "NCCL_MULTI_RANK_GPU_ENABLE";
/// CUDA's variable for the number of queues of a GPU's streams.
const QUEUES: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
/// How many there are by default.
const DEFAULT_QUEUES: u64 = 8;
/// How much memory is kept free for NCCL.
const RESERVE: &str = "CANDLE_DDP_NCCL_RESERVE";
/// CUDA's variable for the time at which kernels are loaded.
const LOADING: &str = "CUDA_MODULE_LOADING";
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// Returns the number of GPUs that this process sees, which `CUDA_VISIBLE_DEVICES` may limit.
///
/// # Errors
/// Returns [`Error::Unavailable`] with the driver's reason, if there is none or the driver does not work.
pub fn device_count() -> Result<usize> {
    let reason = match CudaContext::device_count() {
        Ok(count) if count > 0 => return Ok(count as usize),
        Ok(_) => "CUDA sees none".to_string(),
        Err(error) => super::cuda_error(error),
    };
    let visible = match PROCESS.raw(VISIBLE) {
        Some(value) => format!(" ({VISIBLE}={value:?})"),
        None => String::new(),
    };
    Err(Error::Unavailable {
        what: "a CUDA device".to_string(),
        hint: format!(
            "{reason}{visible}. See that `nvidia-smi` lists a GPU, that the driver is as new as the CUDA toolkit of this \
             build, that a container is started with its GPUs, and that {VISIBLE} does not hide them; or use \
             Backend::Cpu"
        ),
    })
}

/// The device of a rank: `explicit` or else, among the GPUs that `CUDA_VISIBLE_DEVICES` shows, the one whose number is
/// the rank's local rank. If that variable shows exactly one GPU to the process, as under Slurm, it is that one.
///
/// A device that is chosen here has its own stream, which all threads use: with candle's usual one, each thread's default
/// stream, memory that another thread frees would not be ordered with the work that uses it.
pub(crate) fn choose_device(explicit: Option<Device>, local_rank: usize) -> Result<Device> {
    match explicit {
        Some(device) => match device.location() {
            DeviceLocation::Cuda { .. } => Ok(device),
            other => Err(Error::invalid(
                "device",
                format!(
                    "{other:?} is not a CUDA device: give Device::new_cuda_with_stream(…), or None to let the engine choose"
                ),
            )),
        },
        None => {
            let visible = PROCESS.raw(VISIBLE);
            let ordinal = choose(device_count()?, visible.as_deref(), local_rank, shared_gpus_allowed()?)?;
            let device = Device::new_cuda_with_stream(ordinal)?;
            // SAFETY: candle uses one stream of this device, and the engine orders its own streams with that one. Without this, two
            // events would be made for each tensor, and recorded at each use.
            unsafe { device.as_cuda_device()?.disable_event_tracking() };
            Ok(device)
        }
    }
}

/// How many bytes of the GPU are free before NCCL makes a call of a new kind, for which it may need memory.
pub(super) fn reserve() -> Result<u64> {
    const DEFAULT: u64 = 256 << 20;
    Ok(PROCESS.number(RESERVE)?.unwrap_or(DEFAULT))
}

/// Whether several ranks may work on one GPU.
pub(super) fn shared_gpus_allowed() -> Result<bool> {
    Ok([PROCESS.switch(ALLOW_SHARED)?, PROCESS.switch(NCCL_ALLOW_SHARED)?].contains(&Some(true)))
}

/// Refuses settings with which two streams of a group may share a queue. Ranks start calls of different communicators in different
/// orders: in one queue, each call would wait behind another that waits for the other rank.
pub(super) fn check_queues() -> Result<()> {
    let few = |count: u64| {
        let reason = "messages and collectives inside a model, such as SyncBatchNorm's, could wait for the buckets of gradients for \
                      ever, since their streams would share a queue: unset it, or set 32";
        rendezvous::Error::InvalidEnvironment {
            variable: QUEUES.to_string(),
            value: count.to_string(),
            reason: reason.to_string(),
        }
    };
    PROCESS.number(QUEUES)?.filter(|count| *count < DEFAULT_QUEUES).map_or(Ok(()), |count| Err(few(count).into()))
}

/// Warns once if kernels are loaded at their first use. The driver may then wait for a collective in flight, which waits for another rank,
/// and that rank for this one's next call.
pub(super) fn warn_of_loading() {
    static SAID: Once = Once::new();
    if let Some(warning) = late_loading(PROCESS.raw(LOADING).as_deref()) {
        SAID.call_once(|| warn_aloud(format_args!("{warning}")));
    }
}

fn late_loading(value: Option<&str>) -> Option<String> {
    let eager = value.is_some_and(|value| value.trim() == "EAGER");
    let found = value.map_or("is unset".to_string(), |value| format!("is {value:?}"));
    (!eager).then(|| {
        format!(
            "{LOADING} {found}: a GPU kernel that is first used after the first pass, as in an evaluation, is loaded then, which may hang while \
             a collective waits for another rank. Set {LOADING}=EAGER for all ranks, as ddprun does"
        )
    })
}

fn choose(count: usize, visible: Option<&str>, local_rank: usize, shared: bool) -> Result<usize> {
    if local_rank < count {
        return Ok(local_rank);
    }
    let own = count == 1 && visible.is_some_and(|visible| !visible.contains(','));
    if own {
        return Ok(0);
    }
    if shared {
        return Ok(local_rank % count);
    }
    let seen = match visible {
        Some(visible) => format!("with {VISIBLE}={visible:?} this process sees {count} GPU(s)"),
        None => format!("this host has {count} GPU(s)"),
    };
    Err(rendezvous::Error::InvalidEnvironment {
        variable: "LOCAL_RANK".to_string(),
        value: local_rank.to_string(),
        reason: format!(
            "{seen}, but each rank needs its own: start no more ranks than GPUs on a host (--nproc-per-node gpu), \
             set {VISIBLE} so that all GPUs are seen, or use Backend::Cpu"
        ),
    }
    .into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_local_rank_is_the_number_of_the_gpu() {
        assert_eq!(choose(4, None, 3, false).unwrap(), 3);
        assert_eq!(choose(2, Some("5,7"), 1, false).unwrap(), 1);
    }

    #[test]
    fn a_rank_that_was_shown_one_gpu_takes_it() {
        assert_eq!(choose(1, Some("3"), 3, false).unwrap(), 0);
        assert_eq!(choose(1, Some("GPU-8f0b1d2c"), 1, false).unwrap(), 0);
    }

    #[test]
    fn more_ranks_than_gpus_are_refused_or_share() {
        for (visible, expected) in [(None, "this host has 2 GPU(s)"), (Some("0,1"), "CUDA_VISIBLE_DEVICES=\"0,1\"")] {
            let error = choose(2, visible, 5, false).unwrap_err().to_string();
            assert!(error.contains("LOCAL_RANK=\"5\"") && error.contains(expected), "{error}");
        }
        assert!(choose(1, None, 1, false).is_err());
        assert_eq!(choose(2, None, 5, true).unwrap(), 1);
    }

    #[test]
    fn kernels_that_are_loaded_late_are_a_warning() {
        assert_eq!(late_loading(Some(" EAGER\n")), None);
        for (value, found) in
            [(None, "CUDA_MODULE_LOADING is unset"), (Some("LAZY"), "CUDA_MODULE_LOADING is \"LAZY\"")]
        {
            let warning = late_loading(value).unwrap();
            assert!(warning.starts_with(found) && warning.contains("Set CUDA_MODULE_LOADING=EAGER"), "{warning}");
        }
    }

    #[test]
    fn another_device_than_a_gpu_is_refused() {
        let error = choose_device(Some(Device::Cpu), 0).unwrap_err().to_string();
        assert!(error.contains("Cpu is not a CUDA device"), "{error}");
    }
}
