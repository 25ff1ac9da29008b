//! The report that ddprun prints when a run has failed.
use super::config::Topology;
use super::console::Target;
use super::folder::RunFolder;
use super::output::Remains;
use super::root_cause::{Cause, failed};
use super::tail::Tail;
use super::time;
use super::worker::{Ended, Exit, Worker};
use std::fmt::Write;

/// Describes the failure: the rank that caused it, how it ended and its last output; then the other ranks.
pub(super) fn of_failure(
    workers: &[Worker],
    cause: Cause,
    remains: &Remains,
    folder: &RunFolder,
    topology: &Topology,
) -> Option<String> {
    let worker = workers.get(cause.worker)?;
    let rank = worker.rank;
    let mut text = String::new();
    if let Some(elsewhere) = cause.elsewhere {
        let node = elsewhere / topology.local_world_size;
        let _ = writeln!(
            text,
            "rank {elsewhere} failed first, according to the error of rank {rank}: see the output of ddprun on the machine \
             with --node-rank {node}. Here,"
        );
    }
    let ended = worker.ended;
    let first = if workers.len() > 1 && cause.elsewhere.is_none() { " first" } else { "" };
    let _ = match ended {
        Some(ended) if failed(worker) => write!(text, "rank {rank} failed{first}: it {}", ended.how),
        Some(Ended { how, asked_to_exit: false, .. }) => {
            write!(text, "rank {rank} made the other ranks fail: it {how}")
        }
        Some(Ended { how, .. }) => {
            write!(text, "rank {rank} made the other ranks fail: it {how} after ddprun asked it to exit")
        }
        None => write!(text, "rank {rank} made the other ranks fail: it could not be killed"),
    };
    if let Some(ended) = ended {
        let _ = write!(text, ", {:.1} s after the start, at {}", ended.after.as_secs_f64(), time::readable(ended.at));
    }
    let _ = write!(text, " (local rank {}, pid {})", worker.local_rank, worker.pid);
    let tail = last_words(worker, remains);
    if let Some(error) = folder.error(worker.local_rank) {
        section(&mut text, "its error:", error.lines());
    } else if let Some(error) = tail.and_then(Tail::earlier_error) {
        section(&mut text, "its last error:", error.lines());
    }
    match tail {
        Some(tail) => section(&mut text, "its last lines:", tail.lines().iter().map(String::as_str)),
        None => text.push_str("\n  it wrote no output"),
    }
    for (index, other) in workers.iter().enumerate().filter(|(index, _)| *index != cause.worker) {
        let rank = other.rank;
        let _ = match other.ended {
            None => write!(text, "\n  rank {rank} could not be killed (pid {})", other.pid),
            Some(Ended { how: Exit::Code(0), after, .. }) if ended.is_none_or(|ended| after >= ended.after) => continue,
            Some(Ended { how, asked_to_exit: false, .. }) => write!(text, "\n  rank {rank} {how} by itself"),
            Some(Ended { how, .. }) => write!(text, "\n  rank {rank} {how} after ddprun asked it to exit"),
        };
        if let Some(error) = folder.error(index) {
            section(&mut text, "with the error:", error.lines());
        } else if let Some(tail) = last_words(other, remains).filter(|_| failed(other)) {
            match (tail.earlier_error(), tail.lines().last()) {
                (Some(error), _) => section(&mut text, "its last error:", error.lines()),
                (None, Some(last)) => section(&mut text, "its last line:", std::iter::once(last.as_str())),
                (None, None) => {}
            }
        }
    }
    Some(text)
}

/// Returns the last lines of a worker's stderr; if there are none, those of its stdout or of the combined stream.
fn last_words<'a>(worker: &Worker, remains: &'a Remains) -> Option<&'a Tail> {
    let own = remains.iter().filter(|(local_rank, ..)| *local_rank == worker.local_rank);
    let written = own.filter(|(.., tail)| !tail.lines().is_empty());
    written.min_by_key(|(_, target, _)| *target == Target::Stdout).map(|(.., tail)| tail)
}

fn section<'a>(text: &mut String, title: &str, lines: impl Iterator<Item = &'a str>) {
    let _ = write!(text, "\n  {title}");
    for line in lines {
        let _ = write!(text, "\n    {line}");
    }
}
