use super::*;

const SECOND: u64 = 1_000_000_000;

/// Call number `sequence`, which began `sequence` seconds after midnight and took half a second.
fn call(sequence: u64, operation: &str, count: u64) -> CallRecord {
    CallRecord {
        shape: None,
        place: None,
        channel: ChannelKind::Collectives,
        sequence,
        operation: operation.to_string(),
        dtype: (count > 0).then(|| "f32".to_string()),
        count,
        reduction: (operation == "all_reduce").then(|| "sum".to_string()),
        root: (operation == "broadcast").then_some(0),
        peer: None,
        label: None,
        state: CallState::Completed,
        scheduled_ns: sequence * SECOND,
        started_ns: Some(sequence * SECOND),
        completed_ns: Some(sequence * SECOND + SECOND / 2),
        waited_ns: None,
    }
}

/// The same calls, for which the rank waited so many milliseconds.
fn waited(calls: Vec<CallRecord>, milliseconds: u64) -> Vec<CallRecord> {
    calls.into_iter().map(|call| CallRecord { waited_ns: Some(milliseconds * SECOND / 1000), ..call }).collect()
}

#[test]
fn the_rank_that_waits_least_came_last() {
    // Twenty barriers in 19.5 s.
    let of = |waits: [u64; 3]| explained(&waits.map(|wait| Some(waited(barriers(20), wait))));
    let expected = "rank 1 came last to 20 of the last 20 collectives of group world, and the others waited 150.000 ms for it on \
                    average, 15 % of the time from the first of them to the last";
    assert!(of([160, 20, 180]).ends_with(expected), "{}", of([160, 20, 180]));
    assert!(!of([100, 20, 120]).contains("came last"), "{}", of([100, 20, 120]));
    // Old files, and engines that do not know.
    assert!(!explained(&[Some(waited(barriers(20), 200)), Some(barriers(20))]).contains("came last"));
    // Of calls that some forgot, nothing is known.
    let newest = waited(barriers(20), 0).split_off(15);
    let text = explained(&[Some(waited(barriers(20), 300)), Some(newest)]);
    assert!(text.contains("rank 1 came last to 5 of the last 5 collectives"), "{text}");
}

fn open(call: CallRecord, state: CallState) -> CallRecord {
    CallRecord { state, completed_ns: None, ..call }
}

fn waiting(call: CallRecord) -> CallRecord {
    open(call, CallState::Started)
}

fn barriers(count: u64) -> Vec<CallRecord> {
    (1..=count).map(|sequence| call(sequence, "barrier", 0)).collect()
}

fn bucket(sequence: u64) -> CallRecord {
    let label = Some("the gradients of w (bucket 0)".to_string());
    CallRecord { label, ..call(sequence, "all_reduce", 100) }
}

fn then(mut calls: Vec<CallRecord>, last: CallRecord) -> Vec<CallRecord> {
    calls.push(last);
    calls
}

/// What the ranks called in the group of all. Ranks without calls left no file.
fn explained(ranks: &[Option<Vec<CallRecord>>]) -> String {
    let record = |(rank, calls): (usize, &Option<Vec<CallRecord>>)| {
        let all = (0..ranks.len()).collect();
        let group = GroupRecord { name: "world".to_string(), ranks: all, failure: None, calls: calls.clone()? };
        Some(record_of(rank, ranks.len(), vec![group]))
    };
    explain(&ranks.iter().enumerate().filter_map(record).collect::<Vec<_>>())
}

fn record_of(rank: usize, world_size: usize, groups: Vec<GroupRecord>) -> RankRecord {
    let (host, reason) = ("h".to_string(), "a failure".to_string());
    RankRecord { version: 1, rank, world_size, host, pid: 1, reason, written_ns: 0, started_ns: 0, groups }
}

/// The name of the case, the calls of each rank that left a file, and the explanation of them.
type Case = (&'static str, Vec<Option<Vec<CallRecord>>>, &'static str);

#[test]
fn the_rank_that_parted_is_named() {
    let reduced = || then(barriers(16), waiting(bucket(17)));
    let broadcast = || then(barriers(16), waiting(call(17, "broadcast", 10)));
    let forgotten = || reduced().split_off(14);
    let late = || then(barriers(15), waiting(call(16, "barrier", 0)));
    let cases: [Case; 12] = [
        (
            "a rank that had not noted the end of its last call",
            vec![Some(reduced()), Some(broadcast()), Some(late())],
            "rank 1 called broadcast(f32[10], root 0) as call 17 of group world, rank 0 all_reduce(f32[100]) for the gradients \
             of w (bucket 0); rank 2 never came to call 17: its last call, 16, barrier(), had not ended",
        ),
        (
            "another call, and a rank that never came",
            vec![Some(reduced()), Some(reduced()), Some(broadcast()), Some(barriers(16))],
            "rank 2 called broadcast(f32[10], root 0) as call 17 of group world, ranks 0 and 1 all_reduce(f32[100]) for the \
             gradients of w (bucket 0); rank 3 never came to call 17: its last call, 16, barrier(), ended at 00:00:16.500 UTC",
        ),
        (
            "another call",
            vec![Some(reduced()), Some(broadcast()), Some(reduced())],
            "rank 1 called broadcast(f32[10], root 0) as call 17 of group world, all others all_reduce(f32[100]) for the \
             gradients of w (bucket 0)",
        ),
        (
            "two ranks",
            vec![Some(reduced()), Some(broadcast())],
            "rank 1 called broadcast(f32[10], root 0) as call 17 of group world, rank 0 all_reduce(f32[100]) for the gradients \
             of w (bucket 0)",
        ),
        (
            "a rank that is behind",
            vec![Some(reduced()), Some(barriers(15)), Some(reduced())],
            "rank 1 never came to call 16: its last call, 15, barrier(), ended at 00:00:15.500 UTC",
        ),
        (
            "a rank that made no call",
            vec![Some(vec![waiting(call(1, "barrier", 0))]), Some(vec![])],
            "rank 0 waited in call 1 of group world, barrier(); rank 1 never came to call 1, and made none before",
        ),
        (
            "calls that were forgotten",
            vec![Some(forgotten()), Some(barriers(16))],
            "rank 0 waited in call 17 of group world, all_reduce(f32[100]) for the gradients of w (bucket 0); rank 1 never came \
             to call 17: its last call, 16",
        ),
        (
            "the same number of elements of something else",
            vec![Some(vec![call(1, "all_reduce", 100), waiting(call(2, "barrier", 0))]), Some(vec![bucket(1)])],
            "rank 1 called all_reduce(f32[100]) for the gradients of w (bucket 0) as call 1 of group world, rank 0 \
             all_reduce(f32[100])",
        ),
        (
            "nobody parted, but it does not end",
            vec![Some(reduced()), Some(then(barriers(16), bucket(17)))],
            "all ranks that left a file made call 17 of group world, all_reduce(f32[100]) for the gradients of w (bucket 0), \
             which did not complete on rank 0",
        ),
        (
            "a queue that is held up",
            vec![Some(reduced()), Some(then(barriers(16), open(bucket(17), CallState::Scheduled)))],
            "which did not complete on ranks 0 and 1; on rank 1 it had not begun",
        ),
        (
            "a rank without a file",
            vec![Some(reduced()), None, Some(reduced())],
            "which did not complete on ranks 0 and 2\nthere is no file of rank 1: its process was killed",
        ),
        (
            "all is well",
            vec![Some(barriers(3)), Some(barriers(3))],
            "the ranks made the same calls, and all of them completed; the last of group world is call 3, barrier()",
        ),
    ];
    for (case, ranks, expected) in cases {
        let text = explained(&ranks);
        assert!(text.contains(expected), "{case}: {text}");
    }
    assert_eq!(explained(&[Some(vec![])]), "no rank has made a call");
}

#[test]
fn every_group_is_looked_at() {
    let group = |name: &str, ranks: &[usize], calls: Vec<CallRecord>, failure: Option<&str>| GroupRecord {
        name: name.to_string(),
        ranks: ranks.to_vec(),
        failure: failure.map(str::to_string),
        calls,
    };
    let send = |state| CallRecord { channel: ChannelKind::Send, peer: Some(1), state, ..call(3, "send", 4) };
    let received = |sequence| CallRecord { channel: ChannelKind::Recv, peer: Some(0), ..call(sequence, "recv", 4) };
    let records = [
        record_of(
            1,
            4,
            vec![
                group("world", &[0, 1, 2, 3], barriers(2), None),
                group(
                    "world/group0",
                    &[1, 3],
                    vec![waiting(call(1, "broadcast", 8)), send(CallState::Started)],
                    Some("late"),
                ),
            ],
        ),
        record_of(
            3,
            4,
            vec![
                group("world", &[0, 1, 2, 3], barriers(2), None),
                group("world/group0", &[1, 3], vec![waiting(call(1, "barrier", 0)), received(2)], Some("late")),
            ],
        ),
    ];
    let expected = "rank 3 called barrier() as call 1 of group world/group0, rank 1 broadcast(f32[8], root 0)\n\
                    rank 1 waited in message 3 of group world/group0, send(f32[4]) with rank 3, which made 2 matching call(s)\n\
                    there is no file of ranks 0 and 2: its process was killed, or ended before the failure, or wrote to \
                    another folder\n\
                    the error was: late";
    assert_eq!(explain(&records), expected);
}

/// Rank 2 was killed before it could write, and the folder has its file of yesterday.
#[test]
fn a_file_of_an_earlier_run_is_left_out() {
    let record = |rank: usize, at: u64, calls: Vec<CallRecord>| {
        let group = GroupRecord { name: "world".to_string(), ranks: vec![0, 1, 2], failure: None, calls };
        RankRecord { started_ns: at, written_ns: at + 5, ..record_of(rank, 3, vec![group]) }
    };
    let now = || then(barriers(1), waiting(call(2, "barrier", 0)));
    let text = explain(&[record(0, 100, now()), record(1, 102, now()), record(2, 50, barriers(9))]);
    assert!(text.contains("there is no file of rank 2: its process was killed"), "{text}");
    assert!(text.contains("the file of rank 2 was left out: it is older than the groups of the other ranks"), "{text}");
    assert!(text.contains("call 2 of group world, barrier(), which did not complete on ranks 0 and 1"), "{text}");
}
