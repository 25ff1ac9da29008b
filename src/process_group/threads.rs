//! Limits the threads of ranks that share a host.
use std::num::NonZeroUsize;
use std::thread::available_parallelism;

/// The variable that candle and rayon read.
const VARIABLE: &str = "RAYON_NUM_THREADS";

/// The processors of this host.
#[derive(Clone, Copy)]
struct Cpus {
    /// Processors that this process can keep busy, as limited by its affinity and control group.
    usable: usize,
    /// Processors in its affinity mask.
    bound: usize,
    /// Processors of the host.
    online: usize,
}

impl Cpus {
    /// Returns None if the system does not tell.
    fn read() -> Option<Self> {
        let bound = rustix::thread::sched_getaffinity(None).ok()?.count() as usize;
        let online = std::fs::read_to_string("/sys/devices/system/cpu/online").ok()?;
        Some(Self { usable: available_parallelism().ok()?.get(), bound, online: count(online.trim())? })
    }
}

/// The number of processors in a list such as `0-3,8`.
fn count(list: &str) -> Option<usize> {
    let range = |range: &str| -> Option<usize> {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        last.parse::<usize>().ok()?.checked_sub(first.parse().ok()?)?.checked_add(1)
    };
    list.split(',').map(range).sum()
}

/// The number of threads that each of `ranks` ranks should have. None if something else limits them: `variable`, the
/// value of `RAYON_NUM_THREADS`, or a scheduler that has given each rank its own processors.
fn fair_share(variable: Option<&str>, cpus: Cpus, ranks: usize) -> Option<usize> {
    let is_limited = variable.and_then(|value| value.parse::<NonZeroUsize>().ok()).is_some();
    let has_its_own = cpus.bound.saturating_mul(ranks) <= cpus.online;
    (ranks > 1 && !is_limited && !has_its_own).then_some((cpus.usable / ranks).max(1))
}

/// Limits the threads of this process to its share of the processors, if several ranks of the host would each use all
/// of them, and warns once per host. Launchers set the variable; it may be missing for ranks started by hand or by
/// Slurm.
///
/// Matrix products and convolutions run on rayon's threads. At this point an environment variable can no longer be set
/// safely.
pub(super) fn limit(local_rank: usize, local_world_size: usize) {
    let variable = std::env::var(VARIABLE).ok();
    let Some(cpus) = Cpus::read() else { return };
    let Some(share) = fair_share(variable.as_deref(), cpus, local_world_size) else { return };
    let limited = rayon::ThreadPoolBuilder::new().num_threads(share).build_global().is_ok();
    let now = rayon::current_num_threads();
    if local_rank > 0 || (!limited && now <= share) {
        return;
    }
    let usable = cpus.usable;
    let done = match limited {
        true => format!("this crate has limited rayon to {share} thread(s) for each rank"),
        false => format!("rayon has {now} threads in each rank already, which slow each other down"),
    };
    log::warn!(
        "{local_world_size} ranks share the {usable} processors of this host, and {VARIABLE} is not set: {done}. Set \
         {VARIABLE}={share} for each rank, as ddprun does (candle does not read OMP_NUM_THREADS)"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_processors_are_counted() {
        for (list, expected) in
            [("0-63", Some(64)), ("0", Some(1)), ("0-3,8,10-11", Some(7)), ("", None), ("3-1", None)]
        {
            assert_eq!(count(list), expected, "{list}");
        }
        assert!(Cpus::read().is_some_and(|cpus| cpus.usable >= 1 && cpus.bound <= cpus.online));
    }

    #[test]
    fn ranks_that_share_processors_get_their_part() {
        let host = |usable, bound, online| Cpus { usable, bound, online };
        for (variable, cpus, ranks, expected) in [
            (None, host(64, 64, 64), 8, Some(8)),
            (None, host(2, 2, 2), 3, Some(1)),
            (Some("0"), host(64, 64, 64), 8, Some(8)),
            (Some("many"), host(64, 64, 64), 8, Some(8)),
            // The quota of a container.
            (None, host(4, 64, 64), 2, Some(2)),
            // A mask that all ranks share.
            (None, host(32, 32, 64), 8, Some(4)),
            // A single rank, a limit in the variable, and masks set by Slurm.
            (None, host(64, 64, 64), 1, None),
            (Some("64"), host(64, 64, 64), 8, None),
            (None, host(8, 8, 64), 8, None),
        ] {
            assert_eq!(fair_share(variable, cpus, ranks), expected, "{variable:?}, {ranks} ranks");
        }
    }
}
