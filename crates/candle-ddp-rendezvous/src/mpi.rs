//! The job id that an MPI launcher provides, from which all ranks derive a port.
use candle_ddp_base::hash::fnv1a_64;

/// The id of an Open MPI job: the same on all its ranks, and different from every other job's on this host.
pub(super) fn open_mpi_job(text: impl Fn(&str) -> Option<String>) -> Option<String> {
    text("PMIX_NAMESPACE").or_else(|| text("OMPI_MCA_ess_base_jobid"))
}

/// The same for a job of MPICH or Intel MPI whose ranks are all on this host. Their launcher, Hydra, gives jobs no id.
/// But all ranks of a host descend from one proxy process, perhaps with a shell in between.
pub(super) fn hydra_job() -> Option<String> {
    ancestor(|name| name.starts_with("hydra_")).map(|pid| pid.to_string())
}

/// The closest ancestor of this process for whose name `is_right` returns true. Linux only.
fn ancestor(is_right: impl Fn(&str) -> bool) -> Option<u32> {
    let mut pid = std::process::id();
    loop {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name is in parentheses, and may contain some; the parent is the second field after it.
        let (before, after) = stat.rsplit_once(')')?;
        let (_, name) = before.split_once('(')?;
        if is_right(name) {
            return Some(pid);
        }
        pid = after.split_whitespace().nth(1)?.parse().ok().filter(|parent| *parent > 0)?;
    }
}

/// Derives the same port on every rank of a job, below the ephemeral range of the system (from 32768).
pub(super) fn port(job: &str) -> u16 {
    // Consecutive jobs have similar ids, and get very different ports.
    let hash = fnv1a_64(job.as_bytes());
    10_000 + u16::try_from((hash ^ (hash >> 32)) % 20_000).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ancestor_is_found_by_its_name() {
        assert_eq!(ancestor(|_| true), Some(std::process::id()));
        assert_eq!(ancestor(|name| name == "no such process"), None);
    }

    #[test]
    fn jobs_have_different_ports() {
        let ports: Vec<u16> = (0..50).map(|job| port(&(738_066_433_u64 + (job << 16)).to_string())).collect();
        assert!(ports.iter().all(|port| (10_000..30_000).contains(port)), "{ports:?}");
        let distinct: std::collections::BTreeSet<_> = ports.iter().collect();
        assert!(distinct.len() > 48, "{ports:?}");
        assert_eq!(port("prterun-vm-4711@1"), port("prterun-vm-4711@1"));
    }
}
