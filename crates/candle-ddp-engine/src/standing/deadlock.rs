//! Finds ranks that wait for each other, from where they stand.
use super::report::{GroupReport, Report, Wait};
use crate::call::{Call, Channel};
use crate::error::Failure;
use crate::gone::needs;
use std::collections::{BTreeMap, HashMap};

/// A thread that waits: the index of its rank's report, and its number.
type Waiter = (usize, u64);

/// The threads that are taken for stuck, each with its group and its wait.
type Waiters<'a> = BTreeMap<Waiter, (&'a GroupReport, &'a Wait)>;

/// The failure of ranks that wait for each other, if there are some. Of a rank that must be taken for busy, there is no report.
pub(crate) fn deadlock(reports: &[Report]) -> Option<Failure> {
    let mut members: HashMap<u64, Vec<(usize, &GroupReport)>> = HashMap::new();
    let mut stuck = Waiters::new();
    for (index, report) in reports.iter().enumerate() {
        for group in &report.groups {
            members.entry(group.id).or_default().push((index, group));
            stuck.extend(group.waits.iter().map(|wait| ((index, wait.thread), (group, wait))));
        }
    }
    let blocker = |stuck: &Waiters, (index, _): &Waiter, (group, wait): (&GroupReport, &Wait)| {
        let (sequence, call) = group.lane(wait.channel)?.running.filter(|(sequence, _)| *sequence <= wait.sequence)?;
        let others = members.get(&group.id)?.iter().filter(|(other, _)| other != index);
        let mut late = others.filter(|(_, theirs)| lacks(group, wait.channel, (sequence, &call), theirs));
        late.find_map(|(other, theirs)| stuck_thread(stuck, (*other, &reports[*other]), theirs))
    };
    // At first, all are taken for stuck.
    loop {
        let before = stuck.len();
        let still: Waiters = stuck
            .iter()
            .filter(|(waiter, at)| blocker(&stuck, waiter, **at).is_some())
            .map(|(w, at)| (*w, *at))
            .collect();
        stuck = still;
        if stuck.len() == before {
            break;
        }
    }
    // Whoever follows the waits comes to a rank for the second time.
    let mut path: Vec<Waiter> = vec![*stuck.keys().next()?];
    let cycle = loop {
        let last = path.last()?;
        let next = blocker(&stuck, last, *stuck.get(last)?)?;
        if let Some(first) = path.iter().position(|waiter| *waiter == next) {
            break path.split_off(first);
        }
        path.push(next);
    };
    Some(describe(reports, &stuck, cycle))
}

/// Whether a call, which runs in `ours`, cannot end before another rank has started its part, and that has not.
fn lacks(ours: &GroupReport, channel: Channel, (sequence, call): (u64, &Call), theirs: &GroupReport) -> bool {
    let (is_needed, part) = match channel {
        Channel::Collectives => (needs(ours.rank, call, theirs.rank), Channel::Collectives),
        Channel::RecvFrom(peer) => (peer == theirs.rank, Channel::SendTo(ours.rank)),
        // Its data may be on its way without the receiver.
        Channel::SendTo(_) => return false,
    };
    is_needed && theirs.lane(part).map_or(0, |lane| lane.started) < sequence
}

/// One of the rank's threads that may make calls in the group, if all of them are stuck.
fn stuck_thread(stuck: &Waiters, (index, report): (usize, &Report), group: &GroupReport) -> Option<Waiter> {
    if group.is_open {
        return None;
    }
    let mut threads = report.threads.iter().chain(&group.helpers).map(|thread| (index, *thread)).peekable();
    let first = *threads.peek()?;
    threads.all(|thread| stuck.contains_key(&thread)).then_some(first)
}

/// Describes a cycle, in which each waits for the next one. All ranks that find it describe it alike.
fn describe(reports: &[Report], stuck: &Waiters, mut cycle: Vec<Waiter>) -> Failure {
    let rank_of = |(index, _): &Waiter| reports[*index].rank;
    let lowest = cycle.iter().enumerate().min_by_key(|(_, waiter)| (rank_of(waiter), waiter.1)).map_or(0, |(at, _)| at);
    cycle.rotate_left(lowest);
    let known = |waiter: &Waiter| {
        let (group, wait) = stuck.get(waiter)?;
        let (_, call) = group.lane(wait.channel)?.running?;
        let place = call.place.text().or_else(|| wait.place.text()).map(|place| (rank_of(waiter), place));
        Some(((rank_of(waiter), format!("{call} in {}", group.name)), place))
    };
    let (calls, places): (Vec<_>, Vec<Option<_>>) = cycle.iter().filter_map(known).unzip();
    let mut calls = calls.into_iter();
    let [(rank_b, call_b), (rank_a, mut call_a)] = std::array::from_fn(|_| calls.next().unwrap_or_default());
    calls.for_each(|(rank, call)| call_a += &format!(", rank {rank} in {call}"));
    Failure::Desync { sequence: 0, rank_a, call_a, rank_b, call_b, places: places.into_iter().flatten().collect() }
}

#[cfg(test)]
mod tests {
    use super::super::report::Lane;
    use super::*;
    use crate::call_site::CallSite;
    use crate::operation::Operation;

    const GROUPS: [&str; 2] = ["the group of all ranks", "another group"];

    /// How far a rank is in a group: the calls that it has started, and the thread that waits for the last one.
    type Part = (u64, Option<u64>);

    fn group(id: usize, rank: usize, call: Call, (started, thread): Part) -> GroupReport {
        let channel = Channel::Collectives;
        let running = thread.map(|_| (started, call));
        let wait = |thread| Wait { thread, channel, sequence: started, place: CallSite::NONE };
        GroupReport {
            id: id as u64,
            name: GROUPS[id].to_string(),
            rank,
            is_open: false,
            helpers: Vec::new(),
            lanes: vec![Lane { channel, started, running }],
            waits: thread.map(wait).into_iter().collect(),
        }
    }

    /// A rank in two groups, whose threads may make calls.
    fn rank(rank: usize, threads: &[u64], call: Call, parts: [Part; 2]) -> Report {
        let groups = [0, 1].map(|id| group(id, rank, call, parts[id])).to_vec();
        Report { rank, threads: threads.to_vec(), groups }
    }

    fn text(reports: &[Report]) -> Option<String> {
        Some(crate::Error::from(deadlock(reports)?).to_string())
    }

    #[test]
    fn ranks_that_wait_for_each_other_are_found() {
        let barrier = Call::bare(Operation::Barrier);
        let reports =
            [rank(0, &[1], barrier, [(3, Some(1)), (5, None)]), rank(1, &[7], barrier, [(2, None), (6, Some(7))])];
        let text = text(&reports).unwrap();
        let begin = "rank 0 waits in barrier() in the group of all ranks, rank 1 in barrier() in another group: they wait for each other";
        assert!(text.starts_with(begin), "{text}");
    }

    #[test]
    fn whatever_may_go_on_is_no_deadlock() {
        let barrier = Call::bare(Operation::Barrier);
        let first = rank(0, &[1], barrier, [(3, Some(1)), (5, None)]);
        let second = |threads: &[u64], parts| rank(1, threads, barrier, parts);
        let stuck = second(&[7], [(2, None), (6, Some(7))]);
        assert!(deadlock(&[first.clone(), stuck.clone()]).is_some());
        let open = {
            let mut open = stuck.clone();
            open.groups[0].is_open = true;
            open
        };
        let helped = {
            let mut helped = stuck.clone();
            helped.groups[0].helpers = vec![9];
            helped
        };
        let queued = {
            let mut queued = stuck.clone();
            queued.groups[1].lanes[0].running = None;
            queued
        };
        for (name, other) in [
            ("it has come", second(&[7], [(3, None), (6, Some(7))])),
            ("it computes", second(&[7], [(2, None), (5, None)])),
            ("another thread of it computes", second(&[7, 8], [(2, None), (6, Some(7))])),
            ("nobody knows its threads", second(&[], [(2, None), (6, Some(7))])),
            ("its call can end", second(&[7], [(2, None), (5, Some(7))])),
            ("a new thread may call", open),
            ("a helper of it works", helped),
            ("its call is about to run", queued),
        ] {
            assert_eq!(text(&[first.clone(), other]), None, "{name}");
        }
        // It does not answer.
        assert_eq!(text(&[first]), None);
        // The root of a broadcast needs nobody.
        let broadcast = |root| Call { root: Some(root), ..Call::bare(Operation::Broadcast) };
        for root in [0, 1] {
            let first = rank(0, &[1], broadcast(root), [(3, Some(1)), (5, None)]);
            assert_eq!(deadlock(&[first, stuck.clone()]).is_some(), root == 1, "root {root}");
        }
    }

    #[test]
    fn ranks_that_wait_for_a_rank_that_is_busy_are_not_stuck() {
        let barrier = Call::bare(Operation::Barrier);
        let reports = [
            rank(0, &[1], barrier, [(3, Some(1)), (5, None)]),
            rank(1, &[7], barrier, [(3, Some(7)), (5, None)]),
            rank(2, &[4], barrier, [(2, None), (5, None)]),
        ];
        assert_eq!(text(&reports), None);
    }
}
