//! Which rank's failure was the cause of the others'.
use super::config::Topology;
use super::output::Remains;
use super::worker::{Exit, Worker};

/// Where a failure comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cause {
    /// The index of the worker to look at.
    pub(super) worker: usize,
    /// The rank that its error names, where that is a worker of another machine.
    pub(super) elsewhere: Option<usize>,
}

/// The cause of a failure in which the worker with the index `first` was the first to fail.
///
/// The first to end need not be the cause: the others hear of a failure at once, and a process takes a while to write an
/// error or to give its memory back. So a worker that was killed comes before all others; otherwise, a worker whose error
/// names another rank points to that. This one may not have failed: it left too early, or never came to a collective that
/// timed out.
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

/// By itself, and not because it was told to end.
pub(super) fn failed(worker: &Worker) -> bool {
    worker.ended.is_some_and(|ended| !ended.told && ended.how != Exit::Code(0))
}

/// From outside, or for what only it did: processes abort themselves because of others as well.
fn was_killed(worker: &Worker) -> bool {
    const SIGABRT: i32 = signal_hook::consts::SIGABRT;
    worker.ended.is_some_and(|ended| matches!(ended.how, Exit::Signal(signal) if signal != SIGABRT))
}

/// The rank whose failure the last such error of worker `index` names.
fn named_by(workers: &[Worker], index: usize, remains: &Remains) -> Option<usize> {
    let local_rank = workers.get(index)?.local_rank;
    remains.iter().filter(|(of, ..)| *of == local_rank).find_map(|(.., tail)| tail.named())
}
