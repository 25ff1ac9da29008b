//! The report that ddprun prints when a run has failed.
use super::config::Topology;
use super::console::Target;
use super::folder::WorkerError;
use super::output::Remains;
use super::root_cause::{Cause, failed, was_done};
use super::tail::Tail;
use super::time;
use super::worker::{Ended, Exit, Worker};
use signal_hook::consts::SIGKILL;
use std::fmt::Write;

/// Explains a SIGKILL that ddprun did not send.
const OUT_OF_MEMORY: &str =
    "\n  SIGKILL often means that memory ran out: see dmesg, or the memory limit of the container or job";

/// Everything that is known on this machine about a failed run.
pub(super) struct Findings<'a> {
    pub(super) workers: &'a [Worker],
    pub(super) remains: &'a Remains,
    /// The errors that the workers have reported.
    pub(super) errors: &'a [Option<WorkerError>],
    pub(super) topology: Topology,
}

impl Findings<'_> {
    /// Describes the rank that caused the failure: how it ended, and its last output. `place` follows the rank; if
    /// there are several machines, it names the machine.
    pub(super) fn first(&self, cause: Cause, place: &str) -> Option<String> {
        let worker = self.workers.get(cause.worker)?;
        let rank = worker.rank;
        let error = self.errors.get(cause.worker).and_then(Option::as_ref);
        let mut text = String::new();
        if let Some(elsewhere) = cause.elsewhere {
            let node = elsewhere / self.topology.local_world_size;
            let has_left = error.and_then(|error| error.told.as_ref()).is_some_and(|told| told.says_left());
            let what = if has_left { "left before the others had finished" } else { "failed first" };
            let _ = writeln!(
                text,
                "rank {elsewhere} {what}, according to the error of rank {rank}: see the output of ddprun on node {node}"
            );
        }
        let ended = worker.ended;
        let is_one_of_many = self.workers.len() > 1 || self.topology.nodes > 1;
        let first = if is_one_of_many && cause.elsewhere.is_none() { " first" } else { "" };
        let _ = match ended {
            Some(ended) if failed(worker) => write!(text, "rank {rank}{place} failed{first}: it {}", ended.how),
            Some(Ended { how, .. }) if was_done(worker) => {
                write!(text, "rank {rank}{place} ended while the other ranks needed it: it {how}")
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
        if let Some(Ended { how: Exit::Signal(SIGKILL), asked_to_exit: false, .. }) = ended {
            text.push_str(OUT_OF_MEMORY);
        }
        let tail = last_words(worker, self.remains);
        let mut lines = tail.map(Tail::lines).unwrap_or_default();
        if let Some(error) = error {
            section(&mut text, "its error:", error.message.lines());
            // A program also prints its error.
            let is_known = |line: &String| error.message.lines().any(|known| !known.is_empty() && line.contains(known));
            lines.retain(|line| !is_known(line));
        } else if let Some(error) = tail.and_then(Tail::earlier_error) {
            section(&mut text, "its last error:", error.lines());
        }
        match tail {
            Some(_) if lines.is_empty() => {}
            Some(_) => section(&mut text, "its last lines:", lines.iter().map(String::as_str)),
            None => text.push_str("\n  it wrote no output"),
        }
        Some(text)
    }

    /// Describes how the workers other than `first` ended. Those that ended in the same way share a line.
    pub(super) fn others(&self, first: Option<usize>) -> String {
        let mut groups: Vec<(String, Vec<usize>)> = Vec::new();
        let ended = first.and_then(|first| self.workers.get(first)).and_then(|worker| worker.ended);
        for (index, other) in self.workers.iter().enumerate().filter(|(index, _)| Some(*index) != first) {
            let mut end = match other.ended {
                None => format!("could not be killed (pid {})", other.pid),
                Some(Ended { how: Exit::Code(0), after, .. }) if ended.is_none_or(|ended| after >= ended.after) => {
                    continue;
                }
                Some(Ended { how, asked_to_exit: false, .. }) => format!("{how} by itself"),
                Some(Ended { how, .. }) => format!("{how} after ddprun asked it to exit"),
            };
            self.describe_error(index, other, &mut end);
            match groups.iter_mut().find(|(known, _)| *known == end) {
                Some((_, ranks)) => ranks.push(other.rank),
                None => groups.push((end, vec![other.rank])),
            }
        }
        let mut text = String::new();
        for (end, ranks) in groups {
            let _ = match ranks.as_slice() {
                [rank] => write!(text, "\n  rank {rank} {end}"),
                ranks => write!(text, "\n  ranks {}: each {end}", candle_ddp_base::text::ranks(ranks)),
            };
        }
        text
    }

    /// Adds to `text` the error of a worker other than the first.
    fn describe_error(&self, index: usize, worker: &Worker, text: &mut String) {
        let error = self.errors.get(index).and_then(Option::as_ref);
        if let Some(culprit) = error.and_then(WorkerError::culprit) {
            // The worker has printed the error, which says no more than that.
            let _ = write!(text, " because of rank {culprit}");
        } else if let Some(error) = error {
            section(text, "with the error:", error.message.lines());
        } else if let Some(tail) = last_words(worker, self.remains).filter(|_| failed(worker)) {
            match (tail.earlier_error(), tail.lines().last()) {
                (Some(error), _) => section(text, "its last error:", error.lines()),
                (None, Some(last)) => section(text, "its last line:", std::iter::once(last.as_str())),
                (None, None) => {}
            }
        }
    }
}

/// Returns the last lines of a worker's stderr or, if there are none, of its stdout or the combined stream.
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
