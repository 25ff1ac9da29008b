//! Merging the timelines of all ranks.
use crate::file::{PreparedFile, Progress};
use crate::warnings::warn_aloud;
use crate::{Error, Result};
use std::path::{Path, PathBuf};

/// Merges the files `rank*.trace.json` in `folder` into `folder/trace.json`. Returns its path and the number of ranks
/// in it. Incomplete files of killed ranks are included. A file whose last event was before the first one of another
/// rank belongs to an earlier run: it is left out, with a warning.
///
/// # Errors
/// Returns an error if the folder cannot be read or contains no trace, or if the file cannot be written; then no file
/// is left.
pub fn merge(folder: &Path) -> Result<(PathBuf, usize)> {
    let (path, ranks, old) = merge_newest(folder)?;
    old.iter().for_each(|file| warn_aloud(format_args!("{}", left_out(file))));
    Ok((path, ranks))
}

/// The warning that the file of an earlier run is not in the merged timeline.
pub fn left_out(file: &Path) -> String {
    format!(
        "{} is left out: it ends before the traces of the other ranks begin, so it belongs to an earlier run",
        file.display()
    )
}

/// Like [`merge`], but also returns the files that were left out.
pub fn merge_newest(folder: &Path) -> Result<(PathBuf, usize, Vec<PathBuf>)> {
    let failed = |error| Error::io(format!("reading the traces in {}", folder.display()), error);
    let entries = std::fs::read_dir(folder).map_err(failed)?.collect::<std::io::Result<Vec<_>>>().map_err(failed)?;
    let mut files: Vec<PathBuf> = entries.into_iter().map(|entry| entry.path()).filter(|path| is_trace(path)).collect();
    files.sort();
    if files.is_empty() {
        let reason =
            format!("{} contains no rank*.trace.json: set CANDLE_DDP_TRACE to this folder and train", folder.display());
        return Err(Error::invalid("folder", reason));
    }
    let texts = files.iter().map(std::fs::read_to_string).collect::<std::io::Result<Vec<_>>>().map_err(failed)?;
    let times: Vec<Option<(f64, f64)>> = texts.iter().map(|text| span_of(text)).collect();
    // In microseconds. All ranks of a run begin together; the clocks of hosts may differ a little.
    const TOLERANCE: f64 = 1e6;
    let newest = times.iter().flatten().map(|(first, _)| *first).fold(f64::NEG_INFINITY, f64::max);
    let (mut events, mut ranks, mut old) = (Vec::new(), 0, Vec::new());
    for ((file, text), time) in files.into_iter().zip(&texts).zip(times) {
        if time.is_some_and(|(_, last)| last + TOLERANCE < newest) {
            old.push(file);
        } else {
            ranks += 1;
            events.extend(events_of(text));
        }
    }
    // Written completely under a temporary name first, so that a full disk leaves no torn file.
    let path = folder.join("trace.json");
    let prepared = PreparedFile::create_over_links(&path)?;
    prepared.fill(&Progress::default(), |file| writeln!(file, "[{}]", events.join(",\n")))?;
    prepared.commit()?;
    Ok((path, ranks, old))
}

/// When the first event began and the last one ended, if there were any.
fn span_of(text: &str) -> Option<(f64, f64)> {
    let number = |event: &str, key: &str| {
        let rest = &event[event.find(key)? + key.len()..];
        rest[..rest.find([',', '}'])?].parse::<f64>().ok()
    };
    let spans = events_of(text).filter_map(|event| {
        let start = number(event, "\"ts\":")?;
        Some((start, start + number(event, "\"dur\":").unwrap_or(0.)))
    });
    spans.reduce(|(first, last), (start, end)| (first.min(start), last.max(end)))
}

/// The events of a rank's file: one per line; a killed rank's last line may be torn.
fn events_of(text: &str) -> impl Iterator<Item = &str> {
    let lines = text.trim_end().trim_start_matches('[').trim_end_matches(']').lines();
    lines.map(|line| line.trim_end_matches(',')).filter(|line| line.ends_with('}'))
}

/// Checks that a trace that is torn anywhere keeps its whole events.
#[cfg(any(test, fuzzing))]
pub fn fuzz_events(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let count = events_of(&text).count();
    assert!(count <= text.lines().count());
    let end = (0..=text.len() / 2).rfind(|end| text.is_char_boundary(*end)).unwrap_or(0);
    let torn: Vec<&str> = events_of(&text[..end]).collect();
    assert!(torn.len() <= count + 1, "{torn:?}");
}

fn is_trace(path: &Path) -> bool {
    path.file_name()
        .and_then(|name| name.to_str())
        .is_some_and(|name| name.starts_with("rank") && name.ends_with(".trace.json"))
}
