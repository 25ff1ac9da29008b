//! A time line of the training steps, to look at in Perfetto or Chrome's `about:tracing`.
//!
//! Each rank writes one file, `rank<N>.trace.json`, in the [trace event format]: what its training thread does, and the
//! all-reduces beside it. On GPUs these are the times of the GPU, for which each phase of a step waits for it: a step takes
//! longer than without a trace. A bucket is shown as ready there when the host has come so far.
//!
//! `ddprun --merge-traces FOLDER` makes one file of all ranks'.
//!
//! [trace event format]: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
use crate::backend::Work;
use crate::{Error, Result};
use std::fmt::Display;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// The environment variable that names the folder for traces where the options do not.
pub const FOLDER_VARIABLE: &str = "CANDLE_DDP_TRACE";

/// A row of a rank's time line.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Row {
    /// The thread that calls forward, backward and the optimizer.
    Training = 0,
    /// The engine's collectives.
    Communication = 1,
}

/// The trace file of one rank. What is recorded is in the file at the end of each step, and when it is dropped.
pub(crate) struct Trace {
    rank: usize,
    path: PathBuf,
    /// An instant, and the same in microseconds since 1970, which all ranks of a host share.
    origin: Instant,
    origin_us: f64,
    /// None after a write failed: a full disk ends the trace, not the training.
    file: Mutex<Option<BufWriter<File>>>,
}

impl Trace {
    /// Creates `folder` if need be, and in it the file of `rank`.
    pub(crate) fn create(folder: &Path, rank: usize) -> Result<Self> {
        let path = folder.join(format!("rank{rank}.trace.json"));
        let failed = |error| Error::io(format!("creating the trace {}", path.display()), error);
        std::fs::create_dir_all(folder).map_err(failed)?;
        let mut file = BufWriter::new(File::create(&path).map_err(failed)?);
        // The format allows for a missing end of the list, so that the file is good at any time.
        write!(
            file,
            "[{{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":{rank},\"args\":{{\"name\":\"rank {rank}\"}}}}"
        )
        .map_err(failed)?;
        for (row, name) in [(Row::Training, "training"), (Row::Communication, "communication")] {
            let row = row as u8;
            write!(
                file,
                ",\n{{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":{rank},\"tid\":{row},\"args\":{{\"name\":\"{name}\"}}}}"
            )
            .map_err(failed)?;
        }
        let origin = Instant::now();
        let origin_us = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64() * 1e6;
        Ok(Self { rank, path, origin, origin_us, file: Mutex::new(Some(file)) })
    }

    /// Records that something went on from `start` to `end`. `name` needs no escapes in JSON.
    pub(crate) fn span(&self, row: Row, name: impl Display, start: Instant, end: Instant) {
        let (rank, row, at) = (self.rank, row as u8, self.microseconds(start));
        let duration = end.saturating_duration_since(start).as_secs_f64() * 1e6;
        self.write(format_args!(
            ",\n{{\"name\":\"{name}\",\"ph\":\"X\",\"ts\":{at:.1},\"dur\":{duration:.1},\"pid\":{rank},\"tid\":{row}}}"
        ));
    }

    /// Records a collective that was waited for. On a GPU it may have its end before it.
    pub(crate) fn collective(&self, work: &Work, name: impl Display) {
        if work.synchronize().is_ok()
            && let Some((start, end)) = work.span()
        {
            self.span(Row::Communication, name, start, end);
        }
    }

    /// Records that something happened at `at`.
    pub(crate) fn instant(&self, row: Row, name: impl Display, at: Instant) {
        let (rank, row, at) = (self.rank, row as u8, self.microseconds(at));
        self.write(format_args!(
            ",\n{{\"name\":\"{name}\",\"ph\":\"i\",\"s\":\"t\",\"ts\":{at:.1},\"pid\":{rank},\"tid\":{row}}}"
        ));
    }

    /// Hands everything to the operating system.
    pub(crate) fn flush(&self) {
        self.with_file(|file| file.flush());
    }

    fn write(&self, event: std::fmt::Arguments) {
        self.with_file(|file| file.write_fmt(event));
    }

    fn with_file(&self, action: impl FnOnce(&mut BufWriter<File>) -> std::io::Result<()>) {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(open) = file.as_mut()
            && let Err(error) = action(open)
        {
            log::warn!("rank {}: the trace {} ends here: {error}", self.rank, self.path.display());
            *file = None;
        }
    }

    fn microseconds(&self, at: Instant) -> f64 {
        // `at` may lie before the origin by the time that it took to get here.
        let before = self.origin.saturating_duration_since(at).as_secs_f64();
        self.origin_us + (at.saturating_duration_since(self.origin).as_secs_f64() - before) * 1e6
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        self.with_file(|file| {
            file.write_all(b"]\n")?;
            file.flush()
        });
    }
}

/// Makes one trace of the `rank*.trace.json` in `folder`: `folder/trace.json`. Returns its path and how many ranks it
/// shows. Files of ranks that were killed, which lack their end, are taken as well.
///
/// # Errors
/// The folder cannot be read or holds no trace, or the file cannot be written; then none is left.
pub fn merge(folder: &Path) -> Result<(PathBuf, usize)> {
    let failed = |error| Error::io(format!("reading the traces in {}", folder.display()), error);
    let mut events = Vec::new();
    let entries = std::fs::read_dir(folder).map_err(failed)?.collect::<std::io::Result<Vec<_>>>().map_err(failed)?;
    let mut files: Vec<PathBuf> = entries.into_iter().map(|entry| entry.path()).filter(|path| is_trace(path)).collect();
    files.sort();
    for path in &files {
        let text = std::fs::read_to_string(path).map_err(failed)?;
        // One event a line; a killed rank's last line may be torn.
        let lines = text.trim_end().trim_start_matches('[').trim_end_matches(']').lines();
        events.extend(lines.map(|line| line.trim_end_matches(',').to_string()).filter(|line| line.ends_with('}')));
    }
    if files.is_empty() {
        let reason = format!("{} holds no rank*.trace.json: set {FOLDER_VARIABLE} to it and train", folder.display());
        return Err(Error::invalid("folder", reason));
    }
    // Written whole under another name first, so that a full disk leaves no torn file behind.
    let (path, unfinished) = (folder.join("trace.json"), folder.join("trace.json.unfinished"));
    let written = std::fs::write(&unfinished, format!("[{}]\n", events.join(",\n")))
        .and_then(|()| std::fs::rename(&unfinished, &path));
    if let Err(error) = written {
        let _ = std::fs::remove_file(&unfinished);
        return Err(Error::io(format!("writing {}", path.display()), error));
    }
    Ok((path, files.len()))
}

fn is_trace(path: &Path) -> bool {
    path.file_name()
        .and_then(|name| name.to_str())
        .is_some_and(|name| name.starts_with("rank") && name.ends_with(".trace.json"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn traces_are_json_and_merge_also_when_torn() {
        let folder = tempfile::tempdir().unwrap();
        for rank in 0..3 {
            let trace = Trace::create(folder.path(), rank).unwrap();
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
        assert!(merge(folder.path()).unwrap_err().to_string().contains(FOLDER_VARIABLE));
        assert!(merge(&folder.path().join("absent")).is_err());
    }
}
