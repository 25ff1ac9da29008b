//! Writing the timeline of a rank.
use crate::file::{PreparedFile, Progress};
use crate::panic::lock;
use crate::warnings::warn_aloud;
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::fmt::Display;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// A row of a rank's timeline.
#[derive(Clone, Copy, Debug)]
pub enum Row {
    /// The thread that calls forward, backward and the optimizer.
    Training = 0,
    /// The engine's collectives.
    Communication = 1,
}

/// The trace file of one rank. Events reach the file at the end of each step and when the trace is dropped.
#[derive(Debug)]
pub struct Trace {
    rank: usize,
    path: PathBuf,
    /// An instant, and the same time in microseconds since 1970, which all ranks of a host share.
    origin: Instant,
    origin_us: f64,
    /// `None` after a write failed: a full disk ends the trace, not the training.
    file: Mutex<Option<BufWriter<File>>>,
}

impl Trace {
    /// Returns the trace of `rank` in `folder`, which all models of the rank share. Creates both if necessary.
    pub fn open(folder: &Path, rank: usize) -> Result<Arc<Self>> {
        static OPEN: Mutex<BTreeMap<PathBuf, Weak<Trace>>> = Mutex::new(BTreeMap::new());
        let path = folder.join(format!("rank{rank}.trace.json"));
        let mut open = lock(&OPEN);
        if let Some(trace) = open.get(&path).and_then(Weak::upgrade) {
            return Ok(trace);
        }
        let trace = Arc::new(Self::create(folder, path.clone(), rank)?);
        open.retain(|_, trace| trace.strong_count() > 0);
        open.insert(path, Arc::downgrade(&trace));
        Ok(trace)
    }

    fn create(folder: &Path, path: PathBuf, rank: usize) -> Result<Self> {
        let failed = |error| Error::io(format!("creating the folder of traces {}", folder.display()), error);
        std::fs::create_dir_all(folder).map_err(failed)?;
        // A new file replaces an old one, which may be a link, or still be written by a process that is ending.
        let prepared = PreparedFile::create_over_links(&path)?;
        prepared.fill(&Progress::default(), |file| {
            // The format allows a list without its end, so the file is valid at any time.
            write!(
                file,
                "[{{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":{rank},\"args\":{{\"name\":\"rank {rank}\"}}}}"
            )?;
            [(Row::Training, "training"), (Row::Communication, "communication")].into_iter().try_for_each(|(row, name)| {
                let row = row as u8;
                write!(
                    file,
                    ",\n{{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":{rank},\"tid\":{row},\"args\":{{\"name\":\"{name}\"}}}}"
                )
            })
        })?;
        let file = BufWriter::new(prepared.commit_open()?);
        let origin = Instant::now();
        let origin_us = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64() * 1e6;
        Ok(Self { rank, path, origin, origin_us, file: Mutex::new(Some(file)) })
    }

    /// Records a span from `start` to `end`. `name` must not need escapes in JSON.
    pub fn span(&self, row: Row, name: impl Display, start: Instant, end: Instant) {
        let (rank, row, at) = (self.rank, row as u8, self.microseconds(start));
        let duration = end.saturating_duration_since(start).as_secs_f64() * 1e6;
        self.write(format_args!(
            ",\n{{\"name\":\"{name}\",\"ph\":\"X\",\"ts\":{at:.1},\"dur\":{duration:.1},\"pid\":{rank},\"tid\":{row}}}"
        ));
    }

    /// Records an event at `at`.
    pub fn instant(&self, row: Row, name: impl Display, at: Instant) {
        let (rank, row, at) = (self.rank, row as u8, self.microseconds(at));
        self.write(format_args!(
            ",\n{{\"name\":\"{name}\",\"ph\":\"i\",\"s\":\"t\",\"ts\":{at:.1},\"pid\":{rank},\"tid\":{row}}}"
        ));
    }

    /// Flushes all events to the operating system.
    pub fn flush(&self) {
        self.with_file(|file| file.flush());
    }

    fn write(&self, event: std::fmt::Arguments) {
        self.with_file(|file| file.write_fmt(event));
    }

    fn with_file(&self, action: impl FnOnce(&mut BufWriter<File>) -> std::io::Result<()>) {
        let mut file = lock(&self.file);
        if let Some(open) = file.as_mut()
            && let Err(error) = action(open)
        {
            warn_aloud(format_args!(
                "rank {}: the trace {} is incomplete, because writing it failed: {error}",
                self.rank,
                self.path.display()
            ));
            *file = None;
        }
    }

    fn microseconds(&self, at: Instant) -> f64 {
        // `at` may be slightly earlier than the origin.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{merge, merge_newest};
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

    /// A run with three ranks, and then one with two.
    #[test]
    fn a_trace_of_an_earlier_run_is_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let write = |rank: usize, seconds: u64| {
            let trace = Trace::open(folder.path(), rank).unwrap();
            let start = Instant::now() + Duration::from_secs(seconds);
            trace.span(Row::Training, "forward", start, start + Duration::from_secs(60));
        };
        (0..3).for_each(|rank| write(rank, 0));
        (0..2).for_each(|rank| write(rank, 1000 + 30 * rank as u64));
        let (path, ranks, old) = merge_newest(folder.path()).unwrap();
        assert_eq!((ranks, old), (2, vec![folder.path().join("rank2.trace.json")]));
        assert!(!std::fs::read_to_string(path).unwrap().contains("rank 2"));
    }

    /// Who may write to the folder cannot have another file overwritten.
    #[test]
    fn a_link_in_the_folder_is_replaced_and_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let victim = folder.path().join("victim");
        for name in ["rank0.trace.json", "trace.json"] {
            std::fs::write(&victim, "mine").unwrap();
            std::os::unix::fs::symlink(&victim, folder.path().join(name)).unwrap();
        }
        Trace::open(folder.path(), 0).unwrap().instant(Row::Training, "ready", Instant::now());
        let (path, ranks) = merge(folder.path()).unwrap();
        assert_eq!(ranks, 1);
        assert!(std::fs::read_to_string(&path).unwrap().contains("ready"));
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "mine");
    }

    #[test]
    fn a_folder_without_traces_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        assert!(merge(folder.path()).unwrap_err().to_string().contains("CANDLE_DDP_TRACE"));
        assert!(merge(&folder.path().join("absent")).is_err());
    }
}
