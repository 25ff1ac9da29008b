//! The timelines of ranks: how long each waits in a step, and the last steps.
use super::chart::Series;
use super::timeline::{self, Rank, Span};
use super::{chart, html};
use candle_ddp_base::trace;
use serde::Deserialize;
use std::collections::VecDeque;
use std::path::{Path, PathBuf};

/// The most ranks that are shown.
const RANKS: usize = 16;
/// The most spans of a rank that are kept, which are its last: more than a few steps have.
const SPANS: usize = 4096;
/// The phase in which a rank waits for the gradients of the others.
const WAIT: &str = "wait for buckets";

/// The section about the traces of a folder; "" if they have no spans.
pub(super) fn html(folder: &Path, files: &[(usize, PathBuf)], notes: &mut Vec<String>) -> String {
    let parent = files.first().and_then(|(_, file)| file.parent());
    let place = html::place(folder, parent.unwrap_or(folder));
    if files.len() > RANKS {
        notes.push(format!("{place}: only the traces of {RANKS} ranks of {} are shown", files.len()));
    }
    let mut ranks = Vec::new();
    for (rank, file) in files.iter().take(RANKS) {
        match of_rank(*rank, file) {
            Ok(rank) if rank.spans.is_empty() => notes.push(format!("{} has no events", file.display())),
            Ok(rank) => ranks.push(rank),
            Err(error) => notes.push(error.to_string()),
        }
    }
    if ranks.is_empty() {
        return String::new();
    }
    let curves: Vec<_> = ranks.iter().map(|rank| (format!("rank {}", rank.rank), rank.waits.points())).collect();
    let waits = chart::figure("Waiting for the others, in milliseconds", "traced step", &curves);
    let row = |rank: &Rank| {
        let mean = if rank.steps > 0 { rank.waited / rank.steps as f64 } else { 0. };
        [rank.rank.to_string(), rank.steps.to_string(), html::number(mean), html::number(rank.longest)]
    };
    let rows: Vec<_> = ranks.iter().map(row).collect();
    let table = html::table(["rank", "traced steps", "mean wait (ms)", "longest wait (ms)"], &rows);
    let hint = "<p>The rank that waits least is the one that the others wait for.</p>\n";
    let hint = if ranks.len() > 1 { hint } else { "" };
    let steps = timeline::figure(&ranks);
    let title = format!("Waits and timeline: {place}");
    html::section(&title, &format!("<div class=charts>{waits}</div>{table}{hint}{steps}"))
}

/// An event of a trace, with times in microseconds.
#[derive(Deserialize)]
struct Event {
    name: String,
    ph: String,
    #[serde(default)]
    ts: f64,
    #[serde(default)]
    dur: f64,
    #[serde(default)]
    tid: u64,
}

fn of_rank(rank: usize, file: &Path) -> candle_ddp_rendezvous::Result<Rank> {
    let mut read = Rank { rank, waits: Series::default(), steps: 0, waited: 0., longest: 0., spans: VecDeque::new() };
    // A step waits several times if parts of the optimizer's step come in between.
    let mut waited = None;
    for text in trace::events(file)? {
        let Ok(event) = serde_json::from_str::<Event>(&text?) else { continue };
        if event.ph != "X" || !event.ts.is_finite() || !event.dur.is_finite() || event.dur < 0. {
            continue;
        }
        let kind = timeline::Kind::of(&event.name, event.tid);
        if kind == timeline::Kind::Backward {
            read.end_step(waited.take());
        } else if event.name == WAIT {
            waited = Some(waited.unwrap_or(0.) + event.dur / 1e3);
        }
        if read.spans.len() == SPANS {
            read.spans.pop_front();
        }
        read.spans.push_back(Span { kind, start: event.ts / 1e3, end: (event.ts + event.dur) / 1e3 });
    }
    read.end_step(waited);
    Ok(read)
}
