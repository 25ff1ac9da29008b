//! Which rank came last to the collectives.
use super::group::{Group, collectives_of};
use crate::flight_record::record::CallRecord;
use std::collections::BTreeMap;

/// The share of the time that the others must have waited for a rank to be worth a sentence.
const COSTLY: f64 = 0.1;

/// The rank for which the others waited longest, if they lost much time. Hosts have different clocks, so nobody compares when the
/// ranks came: of the ranks in a call, the one that came last has waited least.
pub(super) fn latecomer(name: &str, group: &Group) -> Option<String> {
    let calls: Vec<(usize, BTreeMap<u64, &CallRecord>)> = group
        .iter()
        .map(|(rank, group)| (*rank, collectives_of(group).map(|call| (call.sequence, call)).collect()))
        .collect();
    let (_, first) = calls.first().filter(|_| calls.len() > 1)?;
    // By rank: how often it came last, and for how many nanoseconds each of the others then waited for it.
    let mut late: BTreeMap<usize, (u64, f64)> = BTreeMap::new();
    let (mut common, mut began, mut ended) = (0, u64::MAX, 0);
    for (sequence, own) in first {
        let waits = calls.iter().map(|(rank, calls)| Some((calls.get(sequence)?.waited_ns?, *rank)));
        let (Some(waits), Some(start), Some(end)) =
            (waits.collect::<Option<Vec<_>>>(), own.started_ns, own.completed_ns)
        else {
            continue;
        };
        let (least, last) = waits.iter().copied().min()?;
        let lost: f64 = waits.iter().map(|(waited, _)| (waited - least) as f64).sum();
        let of = late.entry(last).or_default();
        *of = (of.0 + 1, of.1 + lost / (waits.len() - 1) as f64);
        (common, began, ended) = (common + 1, began.min(start), ended.max(end));
    }
    let (rank, (times, lost)) = late.into_iter().max_by(|(_, (_, a)), (_, (_, b))| a.total_cmp(b))?;
    let share = lost / ended.saturating_sub(began) as f64;
    (share > COSTLY).then(|| {
        format!(
            "rank {rank} came last to {times} of the last {common} collectives of group {name}, and the others waited {:.3} ms for it \
             on average, {:.0} % of the time from the first of them to the last",
            lost / times as f64 / 1e6,
            100. * share
        )
    })
}
