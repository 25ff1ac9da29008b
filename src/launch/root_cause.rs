//! Finding the rank whose failure caused the others'.
use super::config::Topology;
use super::output::Remains;
use super::worker::{Exit, Worker};

/// The origin of a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cause {
    /// The index of the worker to report.
    pub(super) worker: usize,
    /// The rank that the worker's error names, if it runs on another machine.
    pub(super) elsewhere: Option<usize>,
}

/// Returns the cause of a failure in which worker `first` was the first to fail.
///
/// The first worker to end need not be the cause: the other ranks learn of a failure at once, while the failing process
/// needs time to write its error or release its memory. So a worker that was killed takes precedence. Otherwise, an
/// error that names another rank points to that rank, which may not have failed itself: it may have left too early, or
/// never joined a collective that timed out.
pub(super) fn cause(workers: &[Worker], first: usize, remains: &Remains, topology: &Topology) -> Cause {
    let killed = workers.iter().enumerate().filter(|(_, worker)| failed(worker) && was_killed(worker));
    if let Some((worker, _)) = killed.min_by_key(|(_, worker)| worker.ended.map(|ended| ended.after)) {
        return Cause { worker, elsewhere: None };
    }
    let mut seen = vec![first];
    let mut worker = first;
    while let Some(rank) = named_by(workers, worker, remains) {
        match workers.iter().position(|worker| worker.rank == rank) {
            Some(next) if !seen.contains(&next) => {
                seen.push(next);
                worker = next;
            }
            Some(_) => break,
            None => return Cause { worker, elsewhere: (rank < topology.world_size()).then_some(rank) },
        }
    }
    Cause { worker, elsewhere: None }
}

/// The worker that was the first to fail by itself.
pub(super) fn first(workers: &[Worker]) -> Option<usize> {
    let failed = workers.iter().enumerate().filter(|(_, worker)| failed(worker));
    failed.min_by_key(|(_, worker)| worker.ended.map(|ended| ended.after)).map(|(index, _)| index)
}

/// Returns whether the worker failed by itself, and not because ddprun ended it. Workers without which the others went on do
/// not count.
pub(super) fn failed(worker: &Worker) -> bool {
    !worker.given_up && worker.ended.is_some_and(|ended| !ended.asked_to_exit && ended.how != Exit::Code(0))
}

/// Returns whether the worker was killed from outside, or by a fault of its own. SIGABRT does not count, because
/// processes also abort because of others.
pub(super) fn was_killed(worker: &Worker) -> bool {
    const SIGABRT: i32 = signal_hook::consts::SIGABRT;
    worker.ended.is_some_and(|ended| matches!(ended.how, Exit::Signal(signal) if signal != SIGABRT))
}

/// Returns the failed rank that the last such error of worker `index` names.
fn named_by(workers: &[Worker], index: usize, remains: &Remains) -> Option<usize> {
    let local_rank = workers.get(index)?.local_rank;
    remains.iter().filter(|(of, ..)| *of == local_rank).find_map(|(.., tail)| tail.named())
}
