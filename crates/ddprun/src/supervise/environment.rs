//! The environment variables of a worker, which are torchrun's.
use crate::command::{Config, Topology};
use candle_ddp_env::PROCESS;
use candle_ddp_rendezvous::{AGENT_VARIABLE, STORE_VARIABLE};
use std::ffi::OsString;

/// Variables that set the number of threads of programs and libraries.
const THREADS: [&str; 2] = ["RAYON_NUM_THREADS", "OMP_NUM_THREADS"];

/// CUDA's settings for programs whose communication waits on the GPU. Kernels are loaded when the program starts: a kernel that is
/// loaded later may wait for everything on the GPU, including a call that waits for another rank. And streams get queues of their
/// own, 32 instead of 8: streams that share one wait for each other. GPUs have the order of their slots, as in nvidia-smi and where
/// ddprun looks up their NUMA nodes; otherwise, CUDA numbers GPUs of several kinds by their speed.
const CUDA: [(&str, &str); 3] =
    [("CUDA_MODULE_LOADING", "EAGER"), ("CUDA_DEVICE_MAX_CONNECTIONS", "32"), ("CUDA_DEVICE_ORDER", "PCI_BUS_ID")];

/// How long mimalloc keeps freed memory before it returns it to the kernel, in milliseconds. A training step allocates what
/// the last one freed: with the default of 10 ms, the kernel zeroes it again in every step. If memory were never returned, a
/// process that frees and allocates in ever new patterns would grow.
const PURGE_DELAY: (&str, &str) = ("MIMALLOC_PURGE_DELAY", "10000");

/// After how many seconds a worker ends itself that hangs in the GPU's driver after a failure. It could not exit, and ddprun would wait
/// for it.
const ABORT_TIMEOUT: (&str, &str) = ("CANDLE_DDP_ABORT_TIMEOUT", "300");

/// Whether the user has set the variable, here or by `--env`.
fn is_given(config: &Config, name: &str) -> bool {
    PROCESS.is_set(name) || config.agent.iter().flatten().any(|(given, _)| given == name)
}

/// Returns the thread variables that ddprun sets, with their values: if several workers share the cores, those that the
/// user has not set. Two ranks that each use all cores are slower than a single one.
pub(crate) fn threads(config: &Config) -> Vec<(&'static str, usize)> {
    let unset = |name: &&'static str| !is_given(config, name);
    config.threads.map_or_else(Vec::new, |count| THREADS.into_iter().filter(unset).map(|name| (name, count)).collect())
}

/// Returns the variables that the worker `local_rank` gets in addition to ddprun's own environment, after so many restarts. By `agent`,
/// elastic workers find their launcher, and differ from earlier ones with the same rank.
pub(crate) fn of(
    config: &Config,
    topology: &Topology,
    local_rank: usize,
    master_port: u16,
    restart_count: u32,
    agent: &str,
) -> Vec<(&'static str, OsString)> {
    let (rank, world_size) = (topology.rank(local_rank).to_string(), topology.world_size().to_string());
    let mut variables: Vec<(&'static str, OsString)> = vec![
        ("RANK", rank.clone().into()),
        ("LOCAL_RANK", config.shown_local_rank(local_rank).to_string().into()),
        ("WORLD_SIZE", world_size.clone().into()),
        ("LOCAL_WORLD_SIZE", topology.local_world_size().to_string().into()),
        ("GROUP_RANK", topology.node_rank.to_string().into()),
        ("GROUP_WORLD_SIZE", topology.layout.nodes().to_string().into()),
        // All workers have the same role.
        ("ROLE_RANK", rank.into()),
        ("ROLE_WORLD_SIZE", world_size.into()),
        ("ROLE_NAME", config.options.role.clone().into()),
        ("MASTER_ADDR", config.master_addr.clone().into()),
        ("MASTER_PORT", master_port.to_string().into()),
        (STORE_VARIABLE, format!("{}:{master_port}", config.master_addr).into()),
        ("TORCHELASTIC_RESTART_COUNT", restart_count.to_string().into()),
        ("TORCHELASTIC_MAX_RESTARTS", config.options.max_restarts.to_string().into()),
        ("TORCHELASTIC_RUN_ID", config.run_id.clone().into()),
        ("TORCHELASTIC_USE_AGENT_STORE", "True".into()),
        (AGENT_VARIABLE, agent.into()),
    ];
    let device = config.virtual_devices.as_ref().and_then(|devices| devices.get(local_rank));
    variables.extend(device.map(|device| ("CUDA_VISIBLE_DEVICES", device.into())));
    let unset = |(name, _): &(&str, &str)| !is_given(config, name);
    let defaults = CUDA.into_iter().chain([PURGE_DELAY, ABORT_TIMEOUT]).filter(unset);
    variables.extend(defaults.map(|(name, value)| (name, value.into())));
    variables.extend(threads(config).into_iter().map(|(name, count)| (name, count.to_string().into())));
    variables
}
