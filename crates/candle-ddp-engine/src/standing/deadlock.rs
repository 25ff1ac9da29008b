//! Finds ranks that wait for each other, from where they stand.
use super::report::{GroupReport, Lane, Making, Report};
use crate::call::{Call, Channel};
use crate::error::Failure;
use crate::gone::needs;
use std::collections::{BTreeSet, HashMap};

/// A call or a construction of a rank that may never end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Running {
    /// A call in a channel of a group: the places of the rank's report, the group and the lane.
    Call(usize, usize, usize),
    /// The construction of a group: the places of the rank's report and of the construction.
    Making(usize, usize),
}

/// The failure of ranks that wait for each other, if there are some. Of a rank that must be taken for busy, there is no report.
pub(crate) fn deadlock(reports: &[Report]) -> Option<Failure> {
    let mut view = View { reports, members: HashMap::new(), stuck: BTreeSet::new() };
    for (index, report) in reports.iter().enumerate() {
        for (place, group) in report.groups.iter().enumerate() {
            view.members.entry(group.id).or_default().push((index, place));
            let running = group.lanes.iter().enumerate().filter(|(_, lane)| lane.running.is_some());
            view.stuck.extend(running.map(|(lane, _)| Running::Call(index, place, lane)));
        }
        view.stuck.extend((0..report.makings.len()).map(|making| Running::Making(index, making)));
    }
    // At first, all are taken for stuck.
    loop {
        let still: BTreeSet<Running> =
            view.stuck.iter().copied().filter(|running| view.blocker(*running).is_some()).collect();
        let is_done = still.len() == view.stuck.len();
        view.stuck = still;
        if is_done {
            break;
        }
    }
    // Whoever follows the waits comes to one for the second time.
    let mut path = vec![*view.stuck.first()?];
    let cycle = loop {
        let next = view.blocker(*path.last()?)?;
        if let Some(first) = path.iter().position(|running| *running == next) {
            break path.split_off(first);
        }
        path.push(next);
    };
    Some(view.describe(cycle))
}

/// Where the ranks stand, and which of their running calls and constructions are taken for stuck: they never end.
struct View<'a> {
    reports: &'a [Report],
    /// The places of the reports and of the group in them, by the group.
    members: HashMap<u64, Vec<(usize, usize)>>,
    stuck: BTreeSet<Running>,
}

impl View<'_> {
    fn at(&self, report: usize, group: usize, lane: usize) -> (&GroupReport, &Lane) {
        let group = &self.reports[report].groups[group];
        (group, &group.lanes[lane])
    }

    /// The places of all other ranks' reports of a group.
    fn others(&self, group: u64, report: usize) -> impl Iterator<Item = (usize, usize)> {
        self.members.get(&group).into_iter().flatten().copied().filter(move |(other, _)| *other != report)
    }

    /// The stuck call or construction because of which another one does not end: of this rank, or of one that has not begun its part.
    fn blocker(&self, running: Running) -> Option<Running> {
        match running {
            Running::Call(report, group, lane) => {
                let (group, lane) = self.at(report, group, lane);
                let (sequence, call) = lane.running?;
                let own = group.next.and_then(|_| self.before(report, lane.behind));
                own.or_else(|| {
                    self.others(group.id, report).find_map(|(report, place)| {
                        let part = needed(group, lane, &call, &self.reports[report].groups[place])?;
                        self.prevents(report, place, part, sequence)
                    })
                })
            }
            Running::Making(report, making) => {
                let Making { id, parent, ranks, .. } = &self.reports[report].makings[making];
                let is_missing = |report: &Report| ranks.contains(&(report.rank as u64)) && !report.has(*id);
                let mut late = self.others(*parent, report).filter(|(other, _)| is_missing(&self.reports[*other]));
                late.find_map(|(other, place)| self.holds_threads(other, &self.reports[other].groups[place], false))
            }
        }
    }

    /// The stuck call or construction because of which a rank does not begin call number `sequence` of `channel`.
    fn prevents(&self, report: usize, place: usize, channel: Channel, sequence: u64) -> Option<Running> {
        let group = &self.reports[report].groups[place];
        // The calls of a channel run in order.
        if let Some(earlier) = self.awaited(report, place, channel, sequence.saturating_sub(1)) {
            return Some(earlier);
        }
        if let Some(lane) = group.lane(channel).filter(|lane| lane.started >= sequence) {
            let is_next = lane.running.is_some_and(|(number, _)| number == sequence);
            return group.next.filter(|_| is_next).and_then(|_| self.before(report, lane.behind));
        }
        group
            .next
            .and_then(|next| self.before(report, next))
            .or_else(|| self.holds_threads(report, group, group.next.is_some()))
    }

    /// A stuck call that the program's stream waits for, of those up to number `last`.
    fn before(&self, report: usize, last: u64) -> Option<Running> {
        let groups = self.reports[report].groups.iter().enumerate();
        let waits = groups.flat_map(|(place, group)| group.stream_waits.iter().map(move |wait| (place, wait)));
        let mut waits = waits.filter(|(_, wait)| wait.number <= last);
        waits.find_map(|(place, wait)| self.awaited(report, place, wait.channel, wait.sequence))
    }

    /// The stuck call or construction that the rank's first thread waits for, if all threads that may make calls in the group wait for one.
    fn holds_threads(&self, report: usize, group: &GroupReport, is_on_gpu: bool) -> Option<Running> {
        if group.is_open {
            return None;
        }
        let threads = self.reports[report].threads.iter().chain(&group.helpers);
        let held: Option<Vec<Running>> = threads.map(|thread| self.holds(report, *thread, is_on_gpu)).collect();
        held?.first().copied()
    }

    /// The stuck call or construction that must end before a thread makes another call, or before another call of it runs on the GPU.
    fn holds(&self, report: usize, thread: u64, is_on_gpu: bool) -> Option<Running> {
        let makings = self.reports[report].makings.iter().enumerate().filter(|(_, making)| making.thread == thread);
        let mut makings = makings.map(|(place, _)| Running::Making(report, place));
        if let Some(making) = makings.find(|making| self.stuck.contains(making)) {
            return Some(making);
        }
        let groups = self.reports[report].groups.iter().enumerate();
        let waits = groups.flat_map(|(place, group)| group.waits.iter().map(move |wait| (place, wait)));
        let mut waits = waits.filter(|(_, wait)| wait.thread == thread && (wait.is_held || is_on_gpu));
        waits.find_map(|(place, wait)| self.awaited(report, place, wait.channel, wait.sequence))
    }

    /// The running call of `channel`, if it is stuck, and is call number `sequence` or comes before that.
    fn awaited(&self, report: usize, place: usize, channel: Channel, sequence: u64) -> Option<Running> {
        let lanes = &self.reports[report].groups[place].lanes;
        let is_awaited =
            |lane: &Lane| lane.channel == channel && lane.running.is_some_and(|(number, _)| number <= sequence);
        let running = Running::Call(report, place, lanes.iter().position(is_awaited)?);
        self.stuck.contains(&running).then_some(running)
    }

    /// Describes a cycle, in which each waits for the next one. All ranks that find it describe it alike.
    fn describe(&self, mut cycle: Vec<Running>) -> Failure {
        let rank_of = |running: &Running| match running {
            Running::Call(report, ..) | Running::Making(report, _) => self.reports[*report].rank,
        };
        let lowest = cycle.iter().enumerate().min_by_key(|(_, running)| (rank_of(running), **running));
        let lowest = lowest.map_or(0, |(at, _)| at);
        cycle.rotate_left(lowest);
        let known = |running: &Running| {
            let (call, place) = match *running {
                Running::Call(report, group, lane) => {
                    let (group, lane) = self.at(report, group, lane);
                    let (_, call) = lane.running?;
                    let wait = group.waits.iter().find(|wait| wait.channel == lane.channel && lane.is_awaited(wait));
                    (format!("{call} in {}", group.name), call.place.text().or_else(|| wait?.place.text()))
                }
                Running::Making(report, making) => {
                    let Making { name, place, .. } = &self.reports[report].makings[making];
                    (format!("the construction of {name}"), place.text())
                }
            };
            Some(((rank_of(running), call), place.map(|place| (rank_of(running), place))))
        };
        let (calls, places): (Vec<_>, Vec<Option<_>>) = cycle.iter().filter_map(known).unzip();
        let mut calls = calls.into_iter();
        let [(rank_b, call_b), (rank_a, mut call_a)] = std::array::from_fn(|_| calls.next().unwrap_or_default());
        calls.for_each(|(rank, call)| call_a += &format!(", rank {rank} in {call}"));
        Failure::Desync { sequence: 0, rank_a, call_a, rank_b, call_b, places: places.into_iter().flatten().collect() }
    }
}

/// The channel of another rank's part of a call that runs in a `lane` of `ours`, if the call cannot end before that part has begun.
fn needed(ours: &GroupReport, lane: &Lane, call: &Call, theirs: &GroupReport) -> Option<Channel> {
    match lane.channel {
        Channel::Collectives => needs(ours.rank, call, theirs.rank).then_some(lane.channel),
        Channel::RecvFrom(peer) => (peer == theirs.rank).then_some(Channel::SendTo(ours.rank)),
        Channel::SendTo(peer) => (peer == theirs.rank && lane.needs_receiver).then_some(Channel::RecvFrom(ours.rank)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::{StreamWait, Wait};
    use super::*;
    use crate::call_site::CallSite;
    use crate::operation::Operation;

    const GROUPS: [&str; 2] = ["the group of all ranks", "another group"];

    /// How far a rank is in a group: the calls that it has started, and the thread that waits for the last one.
    type Part = (u64, Option<u64>);

    fn group(id: usize, rank: usize, call: Call, (started, thread): Part) -> GroupReport {
        let channel = Channel::Collectives;
        let running = thread.map(|_| (started, call));
        let wait = |thread| Wait { thread, channel, sequence: started, place: CallSite::NONE, is_held: true };
        GroupReport {
            id: id as u64,
            name: GROUPS[id].to_string(),
            rank,
            is_open: false,
            helpers: Vec::new(),
            lanes: vec![Lane { channel, started, running, behind: 0, needs_receiver: false }],
            waits: thread.map(wait).into_iter().collect(),
            next: None,
            stream_waits: Vec::new(),
        }
    }

    /// A rank in two groups, whose threads may make calls.
    fn rank(rank: usize, threads: &[u64], call: Call, parts: [Part; 2]) -> Report {
        let groups = [0, 1].map(|id| group(id, rank, call, parts[id])).to_vec();
        Report { rank, threads: threads.to_vec(), groups, makings: Vec::new() }
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
    fn a_message_waits_for_its_receiver_if_it_does_not_fit_on_its_way() {
        let call = |operation| Call { count: 8, ..Call::bare(operation) };
        for (fits, receives, is_stuck) in [(false, false, true), (true, false, false), (false, true, false)] {
            let reports = [0, 1].map(|own| {
                let mut report = rank(own, &[own as u64], call(Operation::Send), [(3, Some(own as u64)), (0, None)]);
                let peer = 1 - own;
                let lane = &mut report.groups[0].lanes[0];
                (lane.channel, lane.needs_receiver) = (Channel::SendTo(peer), !fits);
                report.groups[0].waits[0].channel = Channel::SendTo(peer);
                if receives && own == 1 {
                    let channel = Channel::RecvFrom(0);
                    let lane = Lane { channel, started: 3, running: None, behind: 0, needs_receiver: false };
                    report.groups[0].lanes.push(lane);
                }
                report
            });
            assert_eq!(text(&reports).is_some(), is_stuck, "fits: {fits}, receives: {receives}");
        }
    }

    #[test]
    fn a_group_that_a_rank_makes_waits_for_its_ranks() {
        let barrier = Call::bare(Operation::Barrier);
        let making = |thread, ranks: &[u64]| Making {
            id: 7,
            parent: 0,
            name: "a new group".to_string(),
            ranks: ranks.to_vec(),
            thread,
            number: 1,
            place: CallSite::NONE,
        };
        let first = |ranks: &[u64]| {
            let first = rank(0, &[1], barrier, [(3, None), (5, None)]);
            Report { makings: vec![making(1, ranks)], ..first }
        };
        let second = rank(1, &[7], barrier, [(3, None), (6, Some(7))]);
        let text = |a: &Report, b: &Report| text(&[a.clone(), b.clone()]);
        let begin = "rank 0 waits in the construction of a new group, rank 1 in barrier() in another group: they wait";
        assert!(text(&first(&[0, 1]), &second).unwrap().starts_with(begin));
        assert_eq!(text(&first(&[0, 2]), &second), None, "it is no rank of the group");
        let makes = Report { makings: vec![making(8, &[0, 1])], ..second.clone() };
        assert_eq!(text(&first(&[0, 1]), &makes), None, "another thread of it makes the group");
        let mut has = second.clone();
        has.groups.push(GroupReport { id: 7, ..group(1, 1, barrier, (0, None)) });
        assert_eq!(text(&first(&[0, 1]), &has), None, "it has made the group");
        assert_eq!(
            text(&first(&[0, 1]), &Report { groups: vec![second.groups[1].clone()], ..second }),
            None,
            "unknown"
        );
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

    /// A rank in two groups on a GPU. In each, so many calls were started, the last one is not over, and this is its number among what the
    /// program's stream waits for, before it (0: nothing), and itself (0: the stream does not wait for it).
    fn gpu_rank(rank: usize, parts: [(u64, u64, u64); 2]) -> Report {
        let barrier = Call::bare(Operation::Barrier);
        let groups = [0, 1].map(|id| {
            let (started, behind, number) = parts[id];
            let mut group = group(id, rank, barrier, (started, None));
            let (channel, is_waited_for) = (Channel::Collectives, number > 0);
            group.lanes[0].running = (is_waited_for || behind > 0).then_some((started, barrier));
            group.lanes[0].behind = behind;
            group.next = Some(u64::MAX);
            group.stream_waits.extend(is_waited_for.then_some(StreamWait { channel, sequence: started, number }));
            group
        });
        Report { rank, threads: vec![1], groups: groups.to_vec(), makings: Vec::new() }
    }

    #[test]
    fn a_stream_that_waits_for_a_call_holds_up_all_later_calls() {
        // Rank 0 has not called in the second group, and rank 1 not in the first one.
        let first = gpu_rank(0, [(4, 0, 9), (5, 0, 0)]);
        let second = gpu_rank(1, [(3, 0, 0), (6, 0, 7)]);
        let begin = "rank 0 waits in barrier() in the group of all ranks, rank 1 in barrier() in another group";
        assert!(text(&[first.clone(), second]).unwrap().starts_with(begin));
        // Both have made both calls, in different orders.
        let ahead = |rank, parts| gpu_rank(rank, parts);
        let both = [ahead(0, [(4, 1, 9), (6, 9, 10)]), ahead(1, [(4, 7, 8), (6, 1, 7)])];
        assert!(text(&both).unwrap().starts_with(begin));
        for (name, other) in [
            ("the same order", ahead(1, [(4, 6, 7), (6, 7, 8)])),
            ("its stream does not wait", ahead(1, [(3, 0, 0), (6, 1, 0)])),
            ("it was launched before the stream waited", ahead(1, [(4, 6, 8), (6, 1, 7)])),
            ("it is about to launch a call that comes before the wait", {
                let mut other = gpu_rank(1, [(3, 0, 0), (6, 0, 7)]);
                other.groups[0].next = Some(6);
                other
            }),
            ("another group is not on the GPU", {
                let mut other = gpu_rank(1, [(3, 0, 0), (6, 0, 7)]);
                other.groups[0].next = None;
                other
            }),
        ] {
            assert_eq!(text(&[both[0].clone(), other]), None, "{name}");
        }
    }

    #[test]
    fn a_thread_that_only_launches_holds_up_no_call_on_the_cpu() {
        let barrier = Call::bare(Operation::Barrier);
        let first = rank(0, &[1], barrier, [(3, Some(1)), (5, None)]);
        let mut second = rank(1, &[7], barrier, [(2, None), (6, Some(7))]);
        second.groups[1].waits[0].is_held = false;
        assert_eq!(text(&[first.clone(), second.clone()]), None);
        second.groups[0].next = Some(u64::MAX);
        assert!(text(&[first, second]).is_some());
    }
}
