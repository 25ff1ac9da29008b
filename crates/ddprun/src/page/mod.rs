//! `ddprun report`: a page that shows a run, from the files that it left.
//!
//! The page is one file of HTML with charts in SVG. It has no scripts, and loads nothing.
mod attempts;
mod chart;
mod find;
mod html;
mod metrics;
mod number;
mod palette;
mod series;
#[cfg(test)]
mod tests;
mod timeline;
mod traces;

use super::error::{Error, Result};
use candle_ddp_rendezvous::file::{PreparedFile, Progress};
use find::Found;
use std::path::{Path, PathBuf};

/// The page's name in the folder.
const NAME: &str = "report.html";

/// Writes the page about the run in `folder` to `output`, or else into the folder. Returns its path, and what could not be read.
pub(super) fn write(folder: &Path, output: Option<&Path>) -> Result<(PathBuf, Vec<String>)> {
    let (text, notes) = page(folder)?;
    let path = output.map_or_else(|| folder.join(NAME), Path::to_path_buf);
    let prepared = PreparedFile::create_over_links(&path)?;
    prepared.fill(&Progress::default(), |to| to.write_all(text.as_bytes()))?;
    prepared.commit()?;
    Ok((path, notes))
}

fn page(folder: &Path) -> Result<(String, Vec<String>)> {
    let Found { metrics, traces, attempts, mut notes } = find::find(folder)?;
    let metrics: Vec<_> = metrics.iter().filter_map(|file| metrics::read(folder, file, &mut notes)).collect();
    let traces: Vec<_> = traces.iter().filter_map(|files| traces::read(folder, files, &mut notes)).collect();
    let attempts = attempts::read(folder, &attempts, &mut notes);
    if metrics.is_empty() && traces.is_empty() && attempts.is_empty() {
        let mut reason = format!(
            "{} has nothing to show: no JSON lines of metrics (*.jsonl), no traces (rank*.trace.json), no log files of ddprun \
             (attempt_*)",
            folder.display()
        );
        notes.iter().for_each(|note| reason += &format!("; {note}"));
        return Err(Error::usage("DIR", reason));
    }
    let mut body = String::new();
    metrics.iter().for_each(|metrics| body += &metrics.html());
    traces.iter().for_each(|traces| body += &traces.html());
    body += &attempts.html();
    Ok((html::document(folder, &body, &notes), notes))
}
