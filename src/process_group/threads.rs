//! Limits the threads of ranks that share a host.
use crate::host::boot_id;
use candle_ddp_env::PROCESS;
use std::num::NonZeroUsize;
use std::ops::RangeInclusive;
use std::thread::available_parallelism;

/// The variable that candle and rayon read.
const VARIABLE: &str = "RAYON_NUM_THREADS";

/// The processors that a rank may use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Affinity {
    host: String,
    /// Their numbers; empty if the system does not provide them.
    cpus: Vec<RangeInclusive<usize>>,
}

impl Affinity {
    /// Its affinity mask, as limited by its control group.
    pub(super) fn of_this_process() -> String {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
        let cpus = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap_or_default();
        format!("{} {}", boot_id(), cpus.trim())
    }

    /// Reads the text of [`Affinity::of_this_process`], such as `1b4e28ba-2fa1-11d2-883f-0016d3cca427 0-3,8`.
    pub(super) fn parse(text: &str) -> Self {
        let Some((host, list)) = text.split_once(' ') else { return Self::default() };
        let range = |range: &str| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            Some(first.parse().ok()?..=last.parse().ok()?)
        };
        Self { host: host.to_string(), cpus: list.split(',').filter_map(range).collect() }
    }

    fn overlaps(&self, other: &Self) -> bool {
        let meets = |ours: &RangeInclusive<usize>, theirs: &RangeInclusive<usize>| {
            ours.start() <= theirs.end() && theirs.start() <= ours.end()
        };
        self.host == other.host && self.cpus.iter().any(|ours| other.cpus.iter().any(|theirs| meets(ours, theirs)))
    }
}

/// The ranks that may use the same processors as rank `rank`, itself included.
fn sharers(rank: usize, affinities: &[Affinity]) -> Vec<usize> {
    let shares = |other: &usize| *other == rank || affinities[*other].overlaps(&affinities[rank]);
    (0..affinities.len()).filter(shares).collect()
}

/// The number of threads that each of `ranks` ranks should have if they share `usable` processors. `None` if they are
/// already limited by `variable`, the value of `RAYON_NUM_THREADS`.
fn fair_share(variable: Option<&str>, usable: usize, ranks: usize) -> Option<usize> {
    let is_limited = variable.and_then(|value| value.parse::<NonZeroUsize>().ok()).is_some();
    (ranks > 1 && !is_limited).then_some((usable / ranks).max(1))
}

/// Limits the threads of this process to its share of the processors if several ranks would each use all of them; the
/// first of these ranks logs a warning. Launchers set the variable; it may be missing for ranks started by hand or by
/// Slurm.
///
/// Matrix products and convolutions run on rayon's threads. At this point, it is no longer safe to set an environment
/// variable.
pub(super) fn limit(rank: usize, affinities: &[Affinity]) {
    let variable = PROCESS.raw(VARIABLE);
    let sharers = sharers(rank, affinities);
    let Ok(usable) = available_parallelism().map(NonZeroUsize::get) else { return };
    let Some(share) = fair_share(variable.as_deref(), usable, sharers.len()) else { return };
    let limited = rayon::ThreadPoolBuilder::new().num_threads(share).build_global().is_ok();
    let now = rayon::current_num_threads();
    if sharers[0] != rank || (!limited && now <= share) {
        return;
    }
    let ranks = sharers.len();
    let done = match limited {
        true => format!("this crate has limited rayon to {share} thread(s) for each rank"),
        false => format!("rayon already has {now} threads in each rank, which slow each other down"),
    };
    log::warn!(
        "{ranks} ranks share the {usable} processors of this host, and {VARIABLE} is not set: {done}. Set \
         {VARIABLE}={share} for each rank, as ddprun does (candle does not read OMP_NUM_THREADS)"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_share_processors_where_their_masks_overlap() {
        let affinities = ["a 0-3", "a 4,6-7", "a 2-3,8", "b 0-3", "a ", ""].map(Affinity::parse);
        let expected: [&[usize]; 6] = [&[0, 2], &[1], &[0, 2], &[3], &[4], &[5]];
        for (rank, expected) in expected.into_iter().enumerate() {
            assert_eq!(sharers(rank, &affinities), expected, "rank {rank}");
        }
        let ours = Affinity::parse(&Affinity::of_this_process());
        assert!(ours.overlaps(&ours) && !ours.host.is_empty(), "{ours:?}");
    }

    #[test]
    fn ranks_that_share_processors_get_their_part() {
        for (variable, usable, ranks, expected) in [
            (None, 64, 8, Some(8)),
            (None, 2, 3, Some(1)),
            (Some("0"), 64, 8, Some(8)),
            (Some("many"), 64, 8, Some(8)),
            (None, 64, 1, None),
            (Some("64"), 64, 8, None),
        ] {
            assert_eq!(fair_share(variable, usable, ranks), expected, "{variable:?}, {ranks} ranks");
        }
    }
}
