//! `ddprun report`: a page that shows a run, from the files that it left.
//!
//! The page is one file of HTML with charts in SVG. It has no scripts, and loads nothing.
mod attempts;
mod chart;
mod find;
mod html;
mod metrics;
mod ranks;
#[cfg(test)]
mod tests;
mod timeline;
mod traces;
mod verdicts;

use super::status::RECORD;
use crate::error::{Result, refuse};
use crate::tail::line;
use candle_ddp_base::file::{PreparedFile, Progress};
use find::Found;
use std::path::{Path, PathBuf};

/// The page's name in the folder.
const NAME: &str = "report.html";

/// Writes the page about the run in `folder` to `output`, or else into the folder. Returns its path, and what could not be read.
pub(crate) fn write(folder: &Path, output: Option<&Path>) -> Result<(PathBuf, Vec<String>)> {
    let (text, notes) = page(folder)?;
    let path = output.map_or_else(|| folder.join(NAME), Path::to_path_buf);
    let prepared = PreparedFile::create_over_links(&path)?;
    prepared.fill(&Progress::default(), |to| to.write_all(text.as_bytes()))?;
    prepared.commit()?;
    Ok((path, notes))
}

fn page(folder: &Path) -> Result<(String, Vec<String>)> {
    let Found { metrics, traces, attempts, records, verdicts, flights, mut notes } = find::find(folder)?;
    let verdicts: String = verdicts.iter().map(|file| verdicts::html(folder, file, &mut notes)).collect();
    let metrics: String = metrics.iter().map(|file| metrics::html(folder, file, &mut notes)).collect();
    let traces: String = traces.iter().map(|files| traces::html(folder, files, &mut notes)).collect();
    let attempts = attempts::html(folder, &attempts, &mut notes);
    let ranks: String = records.iter().map(|file| ranks::html(folder, file, &mut notes)).collect();
    let flights: String = flights.iter().map(|of| verdicts::flights(folder, of, &mut notes)).collect();
    let parts = [
        (&metrics, "curves", "metrics::Writer writes them, as *.jsonl"),
        (&ranks, "waits of the ranks", "ddprun --log-dir=FOLDER, where it hosts the store, for programs of candle-ddp"),
        (&traces, "timelines", "CANDLE_DDP_TRACE=FOLDER"),
        (&flights, "the last collectives of a run that has failed", "CANDLE_DDP_FLIGHT_RECORDER=FOLDER"),
        (&attempts, "restarts, and errors of workers", "ddprun --log-dir=FOLDER"),
    ];
    let missing = parts.into_iter().filter(|(part, ..)| part.is_empty());
    let missing: Vec<_> = missing.map(|(_, what, how)| [what, how].map(String::from)).collect();
    if missing.len() == parts.len() && verdicts.is_empty() {
        let mut reason = format!(
            "{} has nothing to show: no JSON lines of metrics (*.jsonl), no traces (rank*.trace.json), no log files of ddprun \
             (attempt_*, {}), no flight records (rank*.flight.json)",
            folder.display(),
            RECORD
        );
        notes.iter().for_each(|note| reason += &format!("; {}", line(note)));
        return refuse("DIR", reason);
    }
    let mut body = [verdicts, metrics, ranks, traces, attempts, flights].concat();
    if !missing.is_empty() {
        body += &html::section("What the run has not recorded", &html::table(["what", "recorded by"], &missing));
    }
    Ok((html::document(folder, &body, &notes), notes))
}
