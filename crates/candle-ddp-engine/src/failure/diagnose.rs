//! Finds the cause of a failed collective from what all ranks reported.
use super::{CallCounts, ProgressReport};
use crate::call::{Call, Channel};
use crate::error::Failure;
use crate::label::Label;
use candle_ddp_base::text;
use std::time::Duration;

/// A call that was not complete at its deadline.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpiredCall<'a> {
    /// The rank that made the call.
    pub rank: usize,
    /// The time-out of the call.
    pub timeout: Duration,
    pub channel: Channel,
    pub sequence: u64,
    pub call: Call,
    /// The ranks whose data is missing; `None` if the engine cannot tell.
    pub awaited: Option<&'a [usize]>,
}

/// The facts about a rank when a call has expired.
#[derive(Clone, Debug)]
pub(crate) enum RankState {
    /// The rank answered.
    Running(ProgressReport),
    /// The rank left in good order, after as many calls as this rank made.
    Left,
    /// The rank's process has ended. Contains the number of collectives it finished, if its memory tells.
    Ended(Option<u64>),
    /// The rank did not answer in time.
    Silent,
    /// The rank could not be asked.
    Unknown,
}

/// The failure that caused `expired`. `ranks` has the state of every rank, including this one; it is empty if the ranks
/// could not be asked.
///
/// Ranks that once made different calls may have continued since, because with little data one call may be taken for
/// another. So the first difference that both ranks remember counts, not their current calls.
pub(crate) fn diagnose(expired: &ExpiredCall, ranks: &[RankState]) -> Failure {
    if let Some(failure) = first_difference(expired, ranks) {
        return failure;
    }
    let left = |peer: &&usize| matches!(ranks.get(**peer), Some(RankState::Left));
    if let Some(peer) = expired.awaited.unwrap_or_default().iter().find(left) {
        return left_since(*peer, expired.rank, expired.sequence, expired.call);
    }
    let peers = ranks.iter().enumerate().filter(|(peer, _)| *peer != expired.rank);
    let (mut waiting_for, mut reasons): (Vec<usize>, Vec<String>) =
        peers.filter_map(|(peer, state)| Some((peer, reason(expired, peer, state)?))).unzip();
    if reasons.is_empty() {
        reasons.push(match (expired.channel, expired.awaited) {
            // Where a batch ends as a whole, which ranks cannot be asked about, a peer may have made its own part.
            (Channel::SendTo(_) | Channel::RecvFrom(_), Some(peers))
                if ranks.is_empty() && expired.call.label == Label::BATCH =>
            {
                waiting_for.extend(peers);
                format!(
                    "of ranks {}, at least one did not make the matching call, or waits for another rank in its own batch",
                    text::ranks(peers)
                )
            }
            (Channel::SendTo(peer) | Channel::RecvFrom(peer), _) => {
                waiting_for.push(peer);
                format!("rank {peer} did not make the matching call")
            }
            (Channel::Collectives, _) if ranks.is_empty() => "the other ranks cannot be asked why".to_string(),
            (Channel::Collectives, Some(peers)) => {
                format!(
                    "all ranks have started it, but ranks {} are too slow, or the network is: look at their load, or \
                     raise the time-out",
                    text::ranks(peers)
                )
            }
            (Channel::Collectives, None) => {
                "all ranks have started it: a GPU or the network between them is too slow, or is stuck. If it is only \
                 slow, raise the time-out"
                    .to_string()
            }
        });
    }
    // Where the program is not known to be in this library, its output may tell.
    let is_behind = |state: &RankState| match state {
        RankState::Running(report) => {
            report.begun < expired.sequence && !report.waits_for_lock && report.activity.is_none()
        }
        _ => false,
    };
    let hint = if expired.channel == Channel::Collectives && ranks.iter().any(is_behind) { BEHIND } else { "" };
    expired.timed_out(waiting_for, some_reasons(&reasons) + hint)
}

/// Advice about ranks that have not started a collective.
const BEHIND: &str =
    ". Look in the output of such a rank for what it does instead, or raise the time-out if it is only slow";

/// The reasons of ranks; of very many, only the first.
fn some_reasons(reasons: &[String]) -> String {
    const SHOWN: usize = 8;
    let text = reasons[..reasons.len().min(SHOWN)].join("; ");
    if reasons.len() > SHOWN { format!("{text}; and {} more", reasons.len() - SHOWN) } else { text }
}

/// The earliest collective at which a rank is known to have made a different call than this rank.
fn first_difference(expired: &ExpiredCall, ranks: &[RankState]) -> Option<Failure> {
    let RankState::Running(ours) = ranks.get(expired.rank)? else { return None };
    let differences = ranks.iter().enumerate().filter_map(|(peer, state)| {
        let RankState::Running(theirs) = state else { return None };
        let last = ours.started.min(theirs.started);
        let first = last.saturating_sub(ours.calls.len() as u64);
        (first..=last).find_map(|sequence| {
            let (our_call, their_call) = (ours.call_at(sequence)?, theirs.call_at(sequence)?);
            (!our_call.matches(&their_call)).then_some((sequence, (expired.rank, our_call), (peer, their_call)))
        })
    });
    // Only collectives are compared, since messages between two ranks have their own order.
    let (sequence, ours, theirs) =
        differences.filter(|_| expired.channel == Channel::Collectives).min_by_key(|(sequence, _, _)| *sequence)?;
    Some(desync(sequence, ours, theirs))
}

/// The reason why `peer` prevents `expired` from completing, if it does.
fn reason(expired: &ExpiredCall, peer: usize, state: &RankState) -> Option<String> {
    let report = match state {
        RankState::Silent => {
            return Some(format!(
                "rank {peer} does not answer: its process is stopped, or its host cannot be reached. Continue or end that \
                 process, or check the network to its host"
            ));
        }
        RankState::Ended(Some(finished)) if *finished >= expired.sequence => return None,
        RankState::Ended(_) => return Some(format!("the process of rank {peer} has ended")),
        RankState::Left | RankState::Unknown => return None,
        RankState::Running(report) => report,
    };
    let last = || {
        let activity = report.activity.as_ref().map_or_else(String::new, |activity| format!(", and it {activity}"));
        match report.call_at(report.begun) {
            Some(call) => {
                let place = call.place.text().map_or_else(String::new, |place| format!(" at {place}"));
                format!("its last was sequence {}, {call}{place}{activity}", report.begun)
            }
            None => format!("its last was sequence {}{activity}", report.begun),
        }
    };
    if expired.channel != Channel::Collectives {
        let is_awaited = expired.awaited.is_some_and(|awaited| awaited.contains(&peer));
        return match is_awaited {
            false => None,
            true if report.waits_for_lock => Some(locked(&format!("rank {peer}"))),
            true if report.begun == 0 => {
                Some(format!("rank {peer} did not make the matching call, nor any collective"))
            }
            true => Some(format!("rank {peer} did not make the matching call; of the collectives, {}", last())),
        };
    }
    if report.waits_for_lock {
        Some(locked(&format!("rank {peer}")))
    } else if report.begun >= expired.sequence {
        None
    } else if report.started >= expired.sequence {
        Some(format!("rank {peer} has started this collective but is not in it: {}", last()))
    } else if report.begun == 0 {
        Some(format!("rank {peer} has not started any collective"))
    } else {
        Some(format!("rank {peer} has not started this collective: {}", last()))
    }
}

impl ExpiredCall<'_> {
    /// The failure of this call, with a reason.
    pub(crate) fn timed_out(&self, waiting_for: Vec<usize>, reason: String) -> Failure {
        let Self { rank, timeout, sequence, call, .. } = *self;
        Failure::TimedOut { rank, call: call.to_string(), sequence, timeout, waiting_for, reason }
    }

    /// The failure of this call if its own program keeps its tensor locked.
    pub(crate) fn locked(&self) -> Failure {
        self.timed_out(Vec::new(), locked("this rank"))
    }
}

/// The reason why `rank` makes no progress: a locked tensor.
fn locked(rank: &str) -> String {
    format!(
        "{rank} waits for the storage of its tensor, which its own program keeps locked: drop the guard that \
         storage_and_layout() returns before the call"
    )
}

/// The failure of two ranks that made different calls. The higher rank is named first, so that all ranks give the same
/// text.
pub(crate) fn desync(sequence: u64, ours: (usize, Call), theirs: (usize, Call)) -> Failure {
    let (a, b) = if ours.0 > theirs.0 { (ours, theirs) } else { (theirs, ours) };
    let (call_a, call_b) = a.1.describe_both(&b.1);
    let place = |(rank, call): (usize, Call)| Some((rank, call.place.text()?));
    let places = [a, b].into_iter().filter_map(place).collect();
    Failure::Desync { sequence, rank_a: a.0, call_a, rank_b: b.0, call_b, places }
}

/// The failure if `peer` left after as many calls as this rank made, without the data that `call` needs: it made a
/// different call.
pub(crate) fn left_since(peer: usize, rank: usize, sequence: u64, call: Call) -> Failure {
    let call_a = "something else (it has left since)".to_string();
    let places = call.place.text().map(|place| (rank, place)).into_iter().collect();
    Failure::Desync { sequence, rank_a: peer, call_a, rank_b: rank, call_b: call.to_string(), places }
}

/// The failure of call number `sequence` on `channel` if `peer` left after `counts` calls, without taking part in it.
pub(crate) fn left_before(
    peer: usize,
    counts: CallCounts,
    channel: Channel,
    sequence: u64,
    call: impl FnOnce() -> String,
) -> Option<Failure> {
    let left_after = counts.matching(channel);
    (left_after < sequence).then(|| Failure::PeerLeft { peer, left_after, call: call(), sequence })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;
    use crate::call_site::CallSite;
    use crate::label::Label;
    use crate::operation::Operation;
    use crate::shape::ShapeCode;

    const BARRIER: Call = Call {
        operation: Operation::Barrier,
        element: None,
        reduction: None,
        root: None,
        count: 0,
        label: Label::NONE,
        shape: ShapeCode::NONE,
        place: CallSite::NONE,
    };
    const ALL_REDUCE: Call = Call { operation: Operation::AllReduce, count: 20, ..BARRIER };

    /// Rank 0 waits in an all-reduce, its call number 17, after 16 barriers.
    fn expired<'a>(channel: Channel, awaited: Option<&'a [usize]>) -> ExpiredCall<'a> {
        let timeout = Duration::from_secs(7);
        ExpiredCall { rank: 0, timeout, channel, sequence: 17, call: ALL_REDUCE, awaited }
    }

    fn calls() -> Vec<Call> {
        [BARRIER; 16].into_iter().chain([ALL_REDUCE]).collect()
    }

    /// A rank that has started and begun all of `calls`.
    fn running(calls: &[Call]) -> RankState {
        let started = calls.len() as u64;
        RankState::Running(ProgressReport { started, begun: started, calls: calls.to_vec(), ..Default::default() })
    }

    fn queued(calls: &[Call], begun: u64) -> RankState {
        let started = calls.len() as u64;
        RankState::Running(ProgressReport { started, begun, calls: calls.to_vec(), ..Default::default() })
    }

    fn loading(calls: &[Call]) -> RankState {
        let RankState::Running(report) = running(calls) else { unreachable!() };
        RankState::Running(ProgressReport { activity: Some("reads sample 4".to_string()), ..report })
    }

    fn locked_out() -> RankState {
        RankState::Running(ProgressReport {
            started: 2,
            begun: 2,
            calls: vec![BARRIER; 2],
            waits_for_lock: true,
            ..Default::default()
        })
    }

    fn text(expired: &ExpiredCall, others: Vec<RankState>) -> String {
        let ranks: Vec<RankState> = std::iter::once(running(&calls())).chain(others).collect();
        Error::from(diagnose(expired, &ranks)).to_string()
    }

    /// The name of the case, the ranks whose data is missing, the other ranks, and the expected failure.
    type Case = (&'static str, Option<&'static [usize]>, Vec<RankState>, &'static str);

    #[test]
    fn a_collective_that_expired_is_explained() {
        let mut early = vec![BARRIER; 20];
        early[4] = ALL_REDUCE;
        let mut saved = calls();
        saved[16].label = Label::register("save_distributed");
        let mut shaped = calls();
        (shaped[15].shape, shaped[16].shape) = (ShapeCode::of(&[2, 3]), ShapeCode::of(&[4, 5]));
        // Calls may come from different places, which the error names if it knows them.
        let placed = |line| Call { place: CallSite::during(line, CallSite::current), ..BARRIER };
        let (here, there) = (placed(std::panic::Location::caller()), placed(std::panic::Location::caller()));
        let mut elsewhere = calls();
        (elsewhere[3], elsewhere[16]) = (here, there);
        let cases: [Case; 16] = [
            (
                "another place, and then another call",
                Some(&[1]),
                vec![running(&elsewhere)],
                "where rank 0 called all_reduce(), sequence 17: all ranks of a group must make the same calls in the same order. \
                 Look for a call that only some ranks make, such as one inside `if rank == 0`. The call of rank 1 is at ",
            ),
            (
                "another call",
                Some(&[1]),
                vec![running(&[BARRIER; 18]), RankState::Silent],
                "rank 1 called barrier() where rank 0 called all_reduce(), sequence 17",
            ),
            (
                "the same call for something else",
                Some(&[1]),
                vec![running(&saved)],
                "rank 1 called all_reduce() for save_distributed where rank 0 called all_reduce(), sequence 17",
            ),
            (
                "the first difference counts, whoever it is with",
                None,
                vec![running(&[BARRIER; 18]), running(&early)],
                "rank 2 called all_reduce() where rank 0 called barrier(), sequence 5",
            ),
            (
                "a rank that is behind",
                None,
                vec![running(&calls()), running(&[BARRIER; 16])],
                "timed out after 7s: rank 2 has not started this collective: its last was sequence 16, barrier()",
            ),
            (
                "a rank whose loader waits",
                None,
                vec![loading(&[BARRIER; 16])],
                "its last was sequence 16, barrier(), and it reads sample 4",
            ),
            ("a rank that never came", None, vec![running(&[])], "after 7s: rank 1 has not started any collective"),
            (
                "a rank whose queue is held up",
                Some(&[1]),
                vec![queued(&calls(), 9)],
                "after 7s: rank 1 has started this collective but is not in it: its last was sequence 9, barrier()",
            ),
            (
                "a locked tensor",
                Some(&[1]),
                vec![locked_out()],
                "after 7s: rank 1 waits for the storage of its tensor, which its own program keeps locked",
            ),
            (
                "no answer",
                Some(&[1, 2]),
                vec![RankState::Silent, running(&calls())],
                "after 7s: rank 1 does not answer: its process is stopped, or its host cannot be reached. Continue or end that \
                 process, or check the network to its host",
            ),
            ("an end", Some(&[1]), vec![RankState::Ended(None)], "after 7s: the process of rank 1 has ended"),
            ("an early end", Some(&[1]), vec![RankState::Ended(Some(16))], "after 7s: the process of rank 1 has ended"),
            (
                "an end after the call",
                Some(&[2]),
                vec![RankState::Ended(Some(17)), running(&calls())],
                "after 7s: all ranks have started it, but ranks [2] are too slow, or the network is",
            ),
            (
                "a rank that left, of which something is missing",
                Some(&[2, 1]),
                vec![RankState::Left, RankState::Silent],
                "rank 1 called something else (it has left since) where rank 0 called all_reduce(), sequence 17",
            ),
            (
                "a rank that left and gave its part",
                Some(&[2]),
                vec![RankState::Left, running(&calls()[..3])],
                "after 7s: rank 2 has not started this collective: its last was sequence 3, barrier()",
            ),
            (
                "nobody is missing",
                None,
                vec![running(&calls())],
                "after 7s: all ranks have started it: a GPU or the network between them is too slow, or is stuck",
            ),
        ];
        for (case, awaited, others, expected) in cases {
            let text = text(&expired(Channel::Collectives, awaited), others);
            assert!(text.contains(expected), "{case}: {text}");
        }
    }

    #[test]
    fn every_culprit_is_named() {
        let others = vec![running(&[]), running(&calls()), RankState::Silent, running(&calls()[..4])];
        let text = text(&expired(Channel::Collectives, None), others);
        for expected in ["rank 1 has not started any", "; rank 3 does not answer", "; rank 4 has not started this"] {
            assert!(text.contains(expected), "{text}");
        }
        assert!(!text.contains("rank 2 ") && text.ends_with(BEHIND), "{text}");
    }

    #[test]
    fn a_message_that_expired_is_explained() {
        let cases: [(RankState, &str); 5] = [
            // The progress of the collectives does not matter.
            (
                running(&[BARRIER; 17]),
                "rank 1 did not make the matching call; of the collectives, its last was sequence 17",
            ),
            (running(&[]), "rank 1 did not make the matching call, nor any collective"),
            (locked_out(), "rank 1 waits for the storage of its tensor"),
            (RankState::Left, "rank 1 called something else (it has left since)"),
            (RankState::Silent, "rank 1 does not answer"),
        ];
        for (state, expected) in cases {
            let text = text(&expired(Channel::RecvFrom(1), Some(&[1])), vec![state, running(&[])]);
            assert!(text.contains(expected) && !text.contains("rank 2"), "{expected}: {text}");
        }
    }

    #[test]
    fn what_can_be_said_without_the_other_ranks_is_said() {
        let text = |channel| Error::from(diagnose(&expired(channel, None), &[])).to_string();
        assert!(text(Channel::Collectives).ends_with("the other ranks cannot be asked why"));
        assert!(text(Channel::SendTo(3)).ends_with("rank 3 did not make the matching call"));
        let call = Call { label: Label::BATCH, ..ALL_REDUCE };
        let batch = diagnose(&ExpiredCall { call, ..expired(Channel::SendTo(3), Some(&[2, 3])) }, &[]);
        assert!(matches!(&batch, Failure::TimedOut { waiting_for, .. } if *waiting_for == [2, 3]), "{batch:?}");
        let text = Error::from(batch).to_string();
        let expected =
            "of ranks [2, 3], at least one did not make the matching call, or waits for another rank in its own batch";
        assert!(text.ends_with(expected), "{text}");
    }

    #[test]
    fn a_rank_that_left_is_missed_in_later_calls_only() {
        let counts = CallCounts { collectives: 4, sent: 2, received: 3 };
        let cases = [
            (Channel::Collectives, 4, None),
            (Channel::Collectives, 5, Some(4)),
            (Channel::SendTo(1), 3, None),
            (Channel::SendTo(1), 4, Some(3)),
            (Channel::RecvFrom(1), 3, Some(2)),
        ];
        for (channel, sequence, left_after) in cases {
            let failure = left_before(1, counts, channel, sequence, || BARRIER.to_string());
            let call = BARRIER.to_string();
            let expected = left_after.map(|left_after| Failure::PeerLeft { peer: 1, left_after, call, sequence });
            assert_eq!(failure, expected, "{channel:?}, {sequence}");
        }
    }
}
