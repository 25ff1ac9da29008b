//! What ddprun says when a run has failed.
use super::console::Target;
use super::folder::RunFolder;
use super::output::Remains;
use super::time;
use super::worker::{Exit, Worker};
use std::fmt::Write;

/// The summary: who failed first, how, and its last words; then the others.
pub(super) fn of_failure(workers: &[Worker], first: usize, remains: Remains, folder: &RunFolder) -> Option<String> {
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
    let mut own: Vec<_> = remains
        .tails
        .into_iter()
        .filter(|(local_rank, ..)| *local_rank == worker.local_rank)
        .map(|(_, target, tail)| (target, tail.into_lines()))
        .filter(|(_, lines)| !lines.is_empty())
        .collect();
    // stderr, or else stdout, or else both in one stream.
    own.sort_by_key(|(target, _)| *target == Target::Stdout);
    match own.first() {
        Some((_, lines)) => section(&mut text, "its last lines:", lines.iter().map(String::as_str)),
        None => text.push_str("\n  it wrote nothing"),
    }
    for (index, other) in workers.iter().enumerate().filter(|(index, _)| *index != first) {
        let rank = other.rank;
        let _ = match other.ended {
            None => write!(text, "\n  rank {rank} could not be ended (pid {})", other.pid),
            Some(ended) if ended.how == Exit::Code(0) => continue,
            Some(ended) if !ended.told => write!(text, "\n  rank {rank} {} in the same moment", ended.how),
            Some(ended) => write!(text, "\n  rank {rank} {} after ddprun had told it to end", ended.how),
        };
        if let Some(error) = folder.error(index) {
            section(&mut text, "with the error:", error.lines());
        }
    }
    Some(text)
}

fn section<'a>(text: &mut String, title: &str, lines: impl Iterator<Item = &'a str>) {
    let _ = write!(text, "\n  {title}");
    for line in lines {
        let _ = write!(text, "\n    {line}");
    }
}
