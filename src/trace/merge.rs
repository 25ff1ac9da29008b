//! Merging the timelines of all ranks.
use crate::{Error, Result};
use std::path::{Path, PathBuf};

/// Merges the files `rank*.trace.json` in `folder` into `folder/trace.json`. Returns its path and the number of ranks
/// in it. Incomplete files of ranks that were killed are included.
///
/// # Errors
/// Returns an error if the folder cannot be read or contains no trace, or if the file cannot be written, in which case
/// none is left.
pub fn merge(folder: &Path) -> Result<(PathBuf, usize)> {
    let failed = |error| Error::io(format!("reading the traces in {}", folder.display()), error);
    let mut events = Vec::new();
    let entries = std::fs::read_dir(folder).map_err(failed)?.collect::<std::io::Result<Vec<_>>>().map_err(failed)?;
    let mut files: Vec<PathBuf> = entries.into_iter().map(|entry| entry.path()).filter(|path| is_trace(path)).collect();
    files.sort();
    for path in &files {
        let text = std::fs::read_to_string(path).map_err(failed)?;
        events.extend(events_of(&text).map(str::to_string));
    }
    if files.is_empty() {
        let reason =
            format!("{} contains no rank*.trace.json: set CANDLE_DDP_TRACE to this folder and train", folder.display());
        return Err(Error::invalid("folder", reason));
    }
    // Written completely under another name first, so that a full disk leaves no torn file.
    let (path, unfinished) = (folder.join("trace.json"), folder.join("trace.json.unfinished"));
    let written = std::fs::write(&unfinished, format!("[{}]\n", events.join(",\n")))
        .and_then(|()| std::fs::rename(&unfinished, &path));
    if let Err(error) = written {
        let _ = std::fs::remove_file(&unfinished);
        return Err(Error::io(format!("writing {}", path.display()), error));
    }
    Ok((path, files.len()))
}

/// The events of a rank's file: one per line; a killed rank's last line may be torn.
fn events_of(text: &str) -> impl Iterator<Item = &str> {
    let lines = text.trim_end().trim_start_matches('[').trim_end_matches(']').lines();
    lines.map(|line| line.trim_end_matches(',')).filter(|line| line.ends_with('}'))
}

/// A trace that was torn anywhere keeps its whole events.
#[cfg(any(test, fuzzing))]
pub(crate) fn fuzz_events(data: &[u8]) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{Row, Trace};
    use std::time::{Duration, Instant};

    #[test]
    fn traces_are_json_and_merge_even_if_torn() {
        let folder = tempfile::tempdir().unwrap();
        for rank in 0..3 {
            let trace = Trace::open(folder.path(), rank).unwrap();
            let start = Instant::now();
            trace.span(Row::Training, "forward", start, start + Duration::from_millis(2));
            trace.instant(Row::Communication, format_args!("bucket {rank} ready"), start);
        }
        let torn = folder.path().join("rank2.trace.json");
        let text = std::fs::read_to_string(&torn).unwrap();
        std::fs::write(&torn, &text[..text.len() - 20]).unwrap();
        let (path, ranks) = merge(folder.path()).unwrap();
        assert_eq!(ranks, 3);
        let merged: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let events = merged.as_array().unwrap();
        assert_eq!(events.len(), 3 * 5 - 1);
        let forward: Vec<_> = events.iter().filter(|event| event["name"] == "forward").collect();
        assert_eq!(forward.len(), 3);
        assert_eq!(forward[1]["pid"], 1);
        assert_eq!(forward[1]["dur"], 2000.0);
    }

    #[test]
    fn a_folder_without_traces_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        assert!(merge(folder.path()).unwrap_err().to_string().contains("CANDLE_DDP_TRACE"));
        assert!(merge(&folder.path().join("absent")).is_err());
    }
}
