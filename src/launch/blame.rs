//! Which worker's failure was the cause of the others'.
use super::output::Remains;
use super::worker::{Exit, Worker};

/// The index of the worker whose failure is the run's, when that with the index `first` was the first to end.
///
/// The first to end need not be the cause: the others hear of a failure at once, and a process takes a while to write an
/// error or to give its memory back. So a worker that was killed comes before all others; otherwise, a worker whose last
/// words name another one's failure points to that.
pub(super) fn culprit(workers: &[Worker], first: usize, remains: &Remains) -> usize {
    let killed = workers.iter().enumerate().filter(|(_, worker)| failed(worker) && was_killed(worker));
    if let Some((index, _)) = killed.min_by_key(|(_, worker)| worker.ended.map(|ended| ended.after)) {
        return index;
    }
    let mut seen = vec![first];
    let mut culprit = first;
    while let Some(next) = named_by(workers, culprit, remains).filter(|next| !seen.contains(next)) {
        seen.push(next);
        culprit = next;
    }
    culprit
}

/// By itself, and not because it was told to end.
pub(super) fn failed(worker: &Worker) -> bool {
    worker.ended.is_some_and(|ended| !ended.told && ended.how != Exit::Code(0))
}

/// From outside, or for what only it did: processes abort themselves because of others as well.
fn was_killed(worker: &Worker) -> bool {
    const SIGABRT: i32 = signal_hook::consts::SIGABRT;
    worker.ended.is_some_and(|ended| matches!(ended.how, Exit::Signal(signal) if signal != SIGABRT))
}

/// The worker whose failure the last words of worker `index` name.
fn named_by(workers: &[Worker], index: usize, remains: &Remains) -> Option<usize> {
    let local_rank = workers.get(index)?.local_rank;
    let own = remains.tails.iter().filter(|(of, ..)| *of == local_rank);
    let rank = own.filter_map(|(.., tail)| tail.lines().iter().rev().find_map(|line| named_in(line))).next()?;
    workers.iter().position(|worker| worker.rank == rank && failed(worker))
}

/// The rank that failed, if `line` is one of the [`Error`](crate::Error)s that say that another rank did.
fn named_in(line: &str) -> Option<usize> {
    const ENDS: [&str; 3] = [" ended the group: ", " left the group ", " is gone: "];
    let before = ENDS.iter().find_map(|end| line.split_once(end))?.0;
    before.rsplit_once("rank ")?.1.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    #[test]
    fn errors_that_name_another_rank_are_known() {
        let call = || "all_reduce(f32[3])".to_string();
        let errors = [
            Error::PeerGone { rank: 0, peer: 12, call: call() },
            Error::PeerLeft { peer: 12, left_after: 5, call: call(), sequence: 6 },
            Error::PeerFailed { peer: 12, reason: "rank 7 is gone: no".to_string() },
        ];
        for error in errors {
            assert_eq!(named_in(&format!("Error: {error}")), Some(12), "{error}");
        }
        let timed_out = Error::invalid("rank 3", "is not what ended it");
        assert_eq!(named_in(&timed_out.to_string()), None);
    }
}
