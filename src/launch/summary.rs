//! What ddprun says when a run has failed.
use super::blame::failed;
use super::console::Target;
use super::folder::RunFolder;
use super::output::Remains;
use super::time;
use super::worker::{Ended, Exit, Worker};
use std::fmt::Write;

/// The summary: who failed first, how, and its last words; then the others.
pub(super) fn of_failure(workers: &[Worker], first: usize, remains: &Remains, folder: &RunFolder) -> Option<String> {
    let worker = workers.get(first)?;
    let ended = worker.ended?;
    let mut text = format!(
        "rank {} failed{}: it {}, {:.1} s after the start, at {} (local rank {}, pid {})",
        worker.rank,
        if workers.len() > 1 { " first" } else { "" },
        ended.how,
        ended.after.as_secs_f64(),
        time::readable(ended.at),
        worker.local_rank,
        worker.pid,
    );
    if let Some(error) = folder.error(worker.local_rank) {
        section(&mut text, "its error:", error.lines());
    }
    match last_lines(worker, remains) {
        Some(lines) => section(&mut text, "its last lines:", lines.iter().map(String::as_str)),
        None => text.push_str("\n  it wrote nothing"),
    }
    for (index, other) in workers.iter().enumerate().filter(|(index, _)| *index != first) {
        let rank = other.rank;
        let _ = match other.ended {
            None => write!(text, "\n  rank {rank} could not be ended (pid {})", other.pid),
            Some(Ended { how: Exit::Code(0), after, .. }) if after >= ended.after => continue,
            Some(Ended { how, told: false, .. }) => write!(text, "\n  rank {rank} {how} by itself"),
            Some(Ended { how, .. }) => write!(text, "\n  rank {rank} {how} after ddprun had told it to end"),
        };
        if let Some(error) = folder.error(index) {
            section(&mut text, "with the error:", error.lines());
        } else if failed(other)
            && let Some(last) = last_lines(other, remains).and_then(|lines| lines.into_iter().next_back())
        {
            section(&mut text, "its last line:", std::iter::once(last.as_str()));
        }
    }
    Some(text)
}

/// The last lines of a worker's stderr, or else of its stdout, or else of both in one stream.
fn last_lines(worker: &Worker, remains: &Remains) -> Option<Vec<String>> {
    let own = remains.tails.iter().filter(|(local_rank, ..)| *local_rank == worker.local_rank);
    let written = own.map(|(_, target, tail)| (*target, tail.lines())).filter(|(_, lines)| !lines.is_empty());
    written.min_by_key(|(target, _)| *target == Target::Stdout).map(|(_, lines)| lines)
}

fn section<'a>(text: &mut String, title: &str, lines: impl Iterator<Item = &'a str>) {
    let _ = write!(text, "\n  {title}");
    for line in lines {
        let _ = write!(text, "\n    {line}");
    }
}
