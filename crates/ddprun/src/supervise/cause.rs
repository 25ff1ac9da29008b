//! Finding the rank whose failure caused the others'.
use super::worker::{Exit, Worker};
use crate::command::Topology;
use crate::verdict::WorkerError;

/// The origin of a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cause {
    /// The index of the worker to report.
    pub(crate) worker: usize,
    /// The rank that the worker's error names, if that rank runs on another machine.
    pub(crate) elsewhere: Option<usize>,
    /// The worker whose error has named the rank, by its index.
    pub(crate) told_by: Option<usize>,
}

/// Returns the cause of a failure in which worker `first` was the first to fail. `errors` holds what each worker has
/// reported.
///
/// The first worker to end need not be the cause: the other ranks learn of a failure at once, while the failing process
/// needs time to write its error or release its memory. So a worker that was killed takes precedence. Otherwise, a
/// worker that has reported another rank's failure points to that rank, which may not have failed itself: it may have
/// left too early, or never joined a collective that timed out. The output of workers is for people, and is not
/// examined.
pub(crate) fn cause(workers: &[Worker], first: usize, errors: &[Option<WorkerError>], topology: &Topology) -> Cause {
    let killed = workers.iter().enumerate().filter(|(_, worker)| failed(worker) && was_killed(worker));
    if let Some((worker, _)) = killed.min_by_key(|(_, worker)| worker.ended.map(|ended| ended.after)) {
        return Cause { worker, elsewhere: None, told_by: None };
    }
    let culprit = |worker: usize| errors.get(worker)?.as_ref()?.culprit();
    let (mut worker, mut told_by, mut seen) = (first, None, vec![first]);
    while let Some(rank) = culprit(worker) {
        match workers.iter().position(|worker| worker.rank == rank) {
            Some(next) if !seen.contains(&next) && may_be_to_blame(workers, next) => {
                seen.push(next);
                (told_by, worker) = (Some(worker), next);
            }
            Some(_) => break,
            None if rank < topology.world_size() => {
                return Cause { worker, elsewhere: Some(rank), told_by: Some(worker) };
            }
            None => break,
        }
    }
    Cause { worker, elsewhere: None, told_by }
}

/// The worker that was the first to fail by itself.
pub(crate) fn first(workers: &[Worker]) -> Option<usize> {
    let failed = workers.iter().enumerate().filter(|(_, worker)| failed(worker));
    failed.min_by_key(|(_, worker)| worker.ended.map(|ended| ended.after)).map(|(index, _)| index)
}

/// Returns whether the worker failed by itself, and not because ddprun ended it. Workers without which the others
/// continued do not count.
pub(crate) fn failed(worker: &Worker) -> bool {
    !worker.given_up && worker.ended.is_some_and(|ended| !ended.asked_to_exit && ended.how != Exit::Code(0))
}

/// Returns whether the worker was killed from outside, or by its own fault, such as a segmentation fault. SIGABRT does
/// not count, because processes also abort because of others.
pub(crate) fn was_killed(worker: &Worker) -> bool {
    const SIGABRT: i32 = signal_hook::consts::SIGABRT;
    worker.ended.is_some_and(|ended| matches!(ended.how, Exit::Signal(signal) if signal != SIGABRT))
}

/// Returns whether the worker had exited with 0 before ddprun asked it to.
pub(crate) fn was_done(worker: &Worker) -> bool {
    worker.ended.is_some_and(|ended| !ended.asked_to_exit && ended.how == Exit::Code(0))
}

/// Whether a worker that others name may have caused their failure. If more workers were done than have failed, the
/// done ones were right, and the others made a call too many.
fn may_be_to_blame(workers: &[Worker], index: usize) -> bool {
    let count = |is: fn(&Worker) -> bool| workers.iter().filter(|worker| is(worker)).count();
    !workers.get(index).is_some_and(was_done) || count(was_done) <= count(failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::Layout;
    use crate::supervise::worker::Ended;
    use candle_ddp_rendezvous::error::RankError;
    use rustix::process::Pid;
    use std::time::{Duration, SystemTime};

    fn worker(rank: usize, how: Exit, after: u64) -> Worker {
        let pid = Pid::from_raw(1 + rank as i32).unwrap();
        let after = Duration::from_millis(after);
        let ended = Some(Ended { how, after, at: SystemTime::UNIX_EPOCH + after, asked_to_exit: false });
        Worker { local_rank: rank, rank, pid, restart_count: 0, ended, given_up: false }
    }

    /// Each message blames a rank that has nothing to do with it.
    fn told(rank: usize, culprit: Option<usize>) -> Option<WorkerError> {
        let message = "rank 3 failed: rank 3 is gone: rank(s) [3]".to_string();
        let told = RankError { rank, culprit, variant: "PeerGone".to_string(), message: message.clone() };
        Some(WorkerError { message, told: Some(told) })
    }

    fn found(workers: &[Worker], errors: &[Option<WorkerError>]) -> (usize, Option<usize>) {
        let topology = Topology { layout: Layout::even(2, 4), node_rank: 0 };
        let Cause { worker, elsewhere, .. } = cause(workers, first(workers).unwrap(), errors, &topology);
        (worker, elsewhere)
    }

    #[test]
    fn what_workers_have_told_counts_and_no_text() {
        let one = Exit::Code(1);
        let workers = [worker(0, one, 1), worker(1, one, 2), worker(2, one, 3), worker(3, one, 4)];
        assert_eq!(found(&workers, &[told(0, Some(1)), told(1, Some(2)), told(2, None), told(3, Some(2))]), (2, None));
        assert_eq!(found(&workers, &[None, told(1, Some(2)), None, None]), (0, None));
        assert_eq!(found(&workers, &[told(0, Some(1)), told(1, Some(0)), None, None]), (1, None));
        assert_eq!(found(&workers, &[told(0, Some(1)), told(1, Some(6)), None, None]), (1, Some(6)));
        assert_eq!(found(&workers, &[told(0, Some(8)), None, None, None]), (0, None));
    }

    #[test]
    fn a_worker_that_was_killed_takes_precedence() {
        let mut workers = [worker(0, Exit::Code(1), 1), worker(1, Exit::Signal(9), 9), worker(2, Exit::Signal(6), 2)];
        assert_eq!(found(&workers, &[told(0, Some(2)), None, None]), (1, None));
        workers[1].ended.as_mut().unwrap().asked_to_exit = true;
        assert_eq!(found(&workers, &[told(0, Some(2)), None, None]), (2, None));
    }

    #[test]
    fn most_ranks_are_right_about_the_number_of_calls() {
        let left = |rank, after| worker(rank, Exit::Code(0), after);
        let failed = |rank, after| worker(rank, Exit::Code(1), after);
        // One call too many on rank 2.
        let workers = [left(0, 1), left(1, 1), failed(2, 2), left(3, 1)];
        assert_eq!(found(&workers, &[None, None, told(2, Some(0)), None]), (2, None));
        // Too few on rank 2.
        let workers = [failed(0, 2), failed(1, 3), left(2, 1), failed(3, 3)];
        assert_eq!(found(&workers, &[told(0, Some(2)), None, None, None]), (2, None));
    }
}
