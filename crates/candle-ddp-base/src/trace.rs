//! The timelines of ranks, and merging them.
mod timeline;

pub use timeline::{Row, Trace};

use crate::file::{PreparedFile, Progress, open_left, rank_in};
use crate::warnings::warn_aloud;
use crate::{Error, Result};
use serde::Deserialize;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

/// Merges the files `rank*.trace.json` in `folder` into `folder/trace.json`. Returns its path and the number of ranks
/// in it. Incomplete files of killed ranks are included. A file whose last event was before the first one of another
/// rank belongs to an earlier run: it is left out, with a warning.
///
/// # Errors
/// Returns an error if the folder cannot be read or contains no trace, if a trace is not a regular file, or if the file cannot be
/// written; then no file is left.
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
    let times = files.iter().map(|file| span_of(file)).collect::<Result<Vec<_>>>()?;
    // In microseconds. All ranks of a run begin together; the clocks of hosts may differ a little.
    const TOLERANCE: f64 = 1e6;
    let newest = times.iter().flatten().map(|(first, _)| *first).fold(f64::NEG_INFINITY, f64::max);
    let is_old = |time: &Option<(f64, f64)>| time.is_some_and(|(_, last)| last + TOLERANCE < newest);
    let (old, new): (Vec<_>, Vec<_>) = files.into_iter().zip(times).partition(|(_, time)| is_old(time));
    let [old, new] = [old, new].map(|files| files.into_iter().map(|(file, _)| file).collect::<Vec<_>>());
    // Written completely under a temporary name first, so that a full disk leaves no torn file.
    let path = folder.join("trace.json");
    let prepared = PreparedFile::create_over_links(&path)?;
    // A read error is not an error of the file that is written.
    let mut unread = None;
    let written = prepared.fill(&Progress::default(), |to| {
        let mut to = BufWriter::new(to);
        let mut separator = "[";
        for file in &new {
            for event in events_in(file)? {
                let (_, text) = event.inspect_err(|_| unread = Some(file))?;
                write!(to, "{separator}{text}")?;
                separator = ",\n";
            }
        }
        // Without any event, it is an empty list.
        to.write_all(if separator == "[" { b"[]\n" } else { b"]\n" })?;
        to.flush()
    });
    match (written, unread) {
        (Err(Error::Io { error, .. }), Some(file)) => return Err(reading(file, error)),
        (written, _) => written?,
    }
    prepared.commit()?;
    Ok((path, new.len(), old))
}

fn reading(file: &Path, error: io::Error) -> Error {
    Error::io(format!("reading {}", file.display()), error)
}

/// When the first event began and the last one ended, if there were any.
fn span_of(file: &Path) -> Result<Option<(f64, f64)>> {
    let mut span: Option<(f64, f64)> = None;
    for event in events_in(file).map_err(|error| reading(file, error))? {
        if let (Event { ts: Some(start), dur }, _) = event.map_err(|error| reading(file, error))? {
            let (first, last) = span.unwrap_or((start, start));
            span = Some((first.min(start), last.max(start + dur.unwrap_or(0.))));
        }
    }
    Ok(span)
}

/// The times of an event, in microseconds.
#[derive(Deserialize)]
struct Event {
    ts: Option<f64>,
    dur: Option<f64>,
}

/// The most bytes of an event: reading a file that is not a trace takes no more memory.
const LONGEST: u64 = 1 << 20;

/// The whole events of a rank's file, as texts in JSON.
pub fn events(file: &Path) -> Result<impl Iterator<Item = Result<String>>> {
    let failed = |error| reading(file, error);
    Ok(events_in(file).map_err(failed)?.map(move |event| event.map(|(_, text)| text).map_err(failed)))
}

fn events_in(file: &Path) -> io::Result<impl Iterator<Item = io::Result<(Event, String)>>> {
    Ok(events_of(BufReader::new(open_left(file)?)))
}

/// The events of a rank's file, with their texts: one per line. The line in which a killed rank's file was torn off, at whatever
/// byte, is not an event.
fn events_of(mut file: impl BufRead) -> impl Iterator<Item = io::Result<(Event, String)>> {
    let mut line = Vec::new();
    std::iter::from_fn(move || {
        loop {
            line.clear();
            match file.by_ref().take(LONGEST).read_until(b'\n', &mut line) {
                Ok(0) => return None,
                Ok(_) => {}
                Err(error) => return Some(Err(error)),
            }
            if let Some(event) = event(&line) {
                return Some(Ok(event));
            }
        }
    })
}

/// The event in a line.
fn event(line: &[u8]) -> Option<(Event, String)> {
    let line = line.trim_ascii();
    let line = line.strip_prefix(b"[").unwrap_or(line);
    let line = line.strip_suffix(b",").or(line.strip_suffix(b"]")).unwrap_or(line);
    // serde takes a list for a struct as well.
    let text = std::str::from_utf8(line).ok().filter(|text| text.starts_with('{'))?;
    Some((serde_json::from_str(text).ok()?, text.to_string()))
}

/// Checks that a trace that is torn anywhere keeps its whole events.
#[cfg(any(test, fuzzing))]
pub fn fuzz_events(data: &[u8]) {
    let texts =
        |data: &[u8]| -> Vec<String> { events_of(data).map(|event| event.expect("memory can be read").1).collect() };
    let all = texts(data);
    let torn = texts(&data[..data.len() / 2]);
    // A line that was cut may have become whole.
    let same = torn.iter().zip(&all).take_while(|(torn, all)| torn == all).count();
    assert!(torn.len() <= same + 1, "{torn:?}");
}

fn is_trace(path: &Path) -> bool {
    path.file_name().and_then(|name| name.to_str()).and_then(|name| rank_in(name, ".trace.json")).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    /// Four events, with braces, brackets and letters of several bytes in them.
    const TRACE: &str = "[{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":0,\"args\":{\"name\":\"rank 0\"}},\n\
        {\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":0,\"tid\":1,\"args\":{\"name\":\"übung {1}, [2]\"}},\n\
        {\"name\":\"vorwärts → ∂\",\"ph\":\"X\",\"ts\":1000.0,\"dur\":2.5,\"pid\":0,\"tid\":1},\n\
        {\"name\":\"bereit\",\"ph\":\"i\",\"s\":\"t\",\"ts\":1001.5,\"pid\":0,\"tid\":1}]\n";

    fn list(file: &Path) -> Vec<serde_json::Value> {
        serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
    }

    #[test]
    fn a_trace_that_is_torn_at_any_byte_keeps_its_whole_events() {
        let folder = tempfile::tempdir().unwrap();
        let file = |rank: usize| folder.path().join(format!("rank{rank}.trace.json"));
        std::fs::write(file(1), TRACE).unwrap();
        let all: Vec<serde_json::Value> = serde_json::from_str(TRACE).unwrap();
        // The ends of the events.
        let ends: Vec<usize> = TRACE
            .lines()
            .scan(0, |end, line| {
                *end += line.len() + 1;
                Some(*end - 2)
            })
            .collect();
        for end in 0..=TRACE.len() {
            std::fs::write(file(0), &TRACE.as_bytes()[..end]).unwrap();
            let (path, ranks, old) = merge_newest(folder.path()).unwrap();
            assert_eq!((ranks, old), (2, vec![]));
            let whole = ends.iter().filter(|one| **one <= end).count();
            assert_eq!(list(&path), [&all[..whole], &all[..]].concat(), "torn at byte {end}");
        }
        // Alone, and without any event.
        std::fs::remove_file(file(1)).unwrap();
        std::fs::write(file(0), "[{").unwrap();
        assert_eq!(list(&merge(folder.path()).unwrap().0), Vec::<serde_json::Value>::new());
    }

    #[test]
    fn a_file_that_is_something_else_takes_no_memory_and_one_that_cannot_be_read_is_named() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("rank0.trace.json"), TRACE).unwrap();
        // Zeros, without the end of a line.
        let other = folder.path().join("rank1.trace.json");
        File::create(&other).unwrap().set_len(1 << 24).unwrap();
        let (path, ranks) = merge(folder.path()).unwrap();
        assert_eq!((list(&path).len(), ranks), (4, 2));
        std::fs::remove_file(&other).unwrap();
        std::fs::create_dir(&other).unwrap();
        let error = merge(folder.path()).unwrap_err().to_string();
        assert!(error.contains("reading") && error.contains("rank1.trace.json"), "{error}");
    }
}
