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

/// What is known on this machine about a run that has failed.
pub(super) struct Findings<'a> {
    pub(super) workers: &'a [Worker],
    pub(super) remains: &'a Remains,
    pub(super) folder: &'a RunFolder,
    pub(super) topology: Topology,
}

impl Findings<'_> {
    /// Describes the rank that caused the failure: how it ended, and its last output. `place` follows the rank; it says
    /// where that is if there are several machines.
    pub(super) fn first(&self, cause: Cause, place: &str) -> Option<String> {
        let worker = self.workers.get(cause.worker)?;
        let rank = worker.rank;
        let mut text = String::new();
        if let Some(elsewhere) = cause.elsewhere {
            let node = elsewhere / self.topology.local_world_size;
            let _ = writeln!(
                text,
                "rank {elsewhere} failed first, according to the error of rank {rank}: see the output of ddprun on the \
                 machine with --node-rank {node}. Here,"
            );
        }
        let ended = worker.ended;
        let is_one_of_many = self.workers.len() > 1 || self.topology.nodes > 1;
        let first = if is_one_of_many && cause.elsewhere.is_none() { " first" } else { "" };
        let _ = match ended {
            Some(ended) if failed(worker) => write!(text, "rank {rank}{place} failed{first}: it {}", ended.how),
            Some(Ended { how, asked_to_exit: false, .. }) => {
                write!(text, "rank {rank}{place} made the other ranks fail: it {how}")
            }
            Some(Ended { how, .. }) => {
                write!(text, "rank {rank}{place} made the other ranks fail: it {how} after ddprun asked it to exit")
            }
            None => write!(text, "rank {rank}{place} made the other ranks fail: it could not be killed"),
        };
        if let Some(ended) = ended {
            let _ =
                write!(text, ", {:.1} s after the start, at {}", ended.after.as_secs_f64(), time::readable(ended.at));
        }
        let _ = write!(text, " (local rank {}, pid {})", worker.local_rank, worker.pid);
        let tail = last_words(worker, self.remains);
        if let Some(error) = self.folder.error(worker.restart_count, worker.local_rank) {
            section(&mut text, "its error:", error.lines());
        } else if let Some(error) = tail.and_then(Tail::earlier_error) {
            section(&mut text, "its last error:", error.lines());
        }
        match tail {
            Some(tail) => section(&mut text, "its last lines:", tail.lines().iter().map(String::as_str)),
            None => text.push_str("\n  it wrote no output"),
        }
        Some(text)
    }

    /// Describes how the workers other than `first` ended, each on lines of its own.
    pub(super) fn others(&self, first: Option<usize>) -> String {
        let mut text = String::new();
        let ended = first.and_then(|first| self.workers.get(first)).and_then(|worker| worker.ended);
        for (_, other) in self.workers.iter().enumerate().filter(|(index, _)| Some(*index) != first) {
            let rank = other.rank;
            let _ = match other.ended {
                None => write!(text, "\n  rank {rank} could not be killed (pid {})", other.pid),
                Some(Ended { how: Exit::Code(0), after, .. }) if ended.is_none_or(|ended| after >= ended.after) => {
                    continue;
                }
                Some(Ended { how, asked_to_exit: false, .. }) => write!(text, "\n  rank {rank} {how} by itself"),
                Some(Ended { how, .. }) => write!(text, "\n  rank {rank} {how} after ddprun asked it to exit"),
            };
            if let Some(error) = self.folder.error(other.restart_count, other.local_rank) {
                section(&mut text, "with the error:", error.lines());
            } else if let Some(tail) = last_words(other, self.remains).filter(|_| failed(other)) {
                match (tail.earlier_error(), tail.lines().last()) {
                    (Some(error), _) => section(&mut text, "its last error:", error.lines()),
                    (None, Some(last)) => section(&mut text, "its last line:", std::iter::once(last.as_str())),
                    (None, None) => {}
                }
            }
        }
        text
    }
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
