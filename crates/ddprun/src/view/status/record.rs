//! The reports of a run's ranks over time, as lines of JSON in its log folder: `ddprun report` shows them.
use super::snapshot::Snapshot;
use crate::console::message;
use candle_ddp_rendezvous::json::encode;
use candle_ddp_rendezvous::milliseconds;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

/// The file's name.
pub(crate) const RECORD: &str = "ddprun-ranks.jsonl";
/// The time between two lines at first. It doubles whenever so many bytes were written, so that a file grows with the logarithm of
/// the run's length.
const INTERVAL: Duration = Duration::from_secs(1);
const DOUBLING: usize = 1 << 20;

/// The ranks of a run at some time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Line {
    /// In milliseconds since 1970.
    pub(crate) at: u64,
    pub(crate) restarts: u32,
    pub(crate) ranks: Vec<Told>,
}

/// A rank's report. What is unknown is `None`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Told {
    pub(crate) rank: usize,
    pub(crate) host: String,
    pub(crate) pid: u32,
    pub(crate) steps: u64,
    /// Seconds since the first step of this process.
    pub(crate) trained: f64,
    /// For how many of these it has waited for other ranks.
    pub(crate) waited: Option<f64>,
}

impl Line {
    fn of(snapshot: &Snapshot) -> Self {
        let short = |seconds: f64| (seconds * 1e3).round() / 1e3;
        let told = |(rank, told): &(usize, Option<candle_ddp_rendezvous::RankStatus>)| {
            let told = told.as_ref()?;
            let (trained, waited) = (short(told.trained), told.waited.map(short));
            Some(Told { rank: *rank, host: told.host.clone(), pid: told.pid, steps: told.steps, trained, waited })
        };
        Self {
            at: milliseconds(SystemTime::now()),
            restarts: snapshot.run.restarts,
            ranks: snapshot.ranks.iter().filter_map(told).collect(),
        }
    }
}

/// Writes the file, from the first report of a rank on.
pub(crate) struct Recorder {
    /// `None` if the run leaves no folder, or the file could not be written.
    path: Option<PathBuf>,
    file: Option<File>,
    interval: Duration,
    /// Since the interval was doubled.
    bytes: usize,
    last: Option<(Instant, Line)>,
}

impl Recorder {
    pub(crate) fn new(path: Option<PathBuf>) -> Self {
        Self { path, file: None, interval: INTERVAL, bytes: 0, last: None }
    }

    /// Writes a line if it is time and something has changed; `is_last`: whether or not it is time.
    pub(crate) fn record(&mut self, snapshot: &Snapshot, is_last: bool) {
        let is_early = self.last.as_ref().is_some_and(|(at, _)| at.elapsed() < self.interval);
        if self.path.is_none() || (is_early && !is_last) {
            return;
        }
        let line = Line::of(snapshot);
        // Programs that make no steps leave no file.
        let says_nothing = self.last.is_none() && line.ranks.iter().all(|told| told.steps == 0);
        let is_like = |last: &Line| (last.restarts, &last.ranks) == (line.restarts, &line.ranks);
        if says_nothing || self.last.as_ref().is_some_and(|(_, last)| is_like(last)) {
            return;
        }
        let text = [encode(&line), vec![b'\n']].concat();
        self.bytes += text.len();
        if self.bytes >= DOUBLING {
            (self.interval, self.bytes) = (2 * self.interval, 0);
        }
        self.last = Some((Instant::now(), line));
        if let Err(error) = self.write(&text) {
            let path = self.path.take().unwrap_or_default();
            message(format_args!("`ddprun report` will lack waits of the ranks: writing {}: {error}", path.display()));
        }
    }

    fn write(&mut self, text: &[u8]) -> std::io::Result<()> {
        let file = match (&mut self.file, &self.path) {
            (Some(file), _) => file,
            (none, Some(path)) => none.insert(File::create_new(path)?),
            (None, None) => return Ok(()),
        };
        file.write_all(text)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::snapshot;
    use super::*;

    #[test]
    fn a_line_is_written_for_each_change() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(RECORD);
        let lines = || -> Vec<Line> {
            let text = std::fs::read_to_string(&path).unwrap();
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
        };
        let mut recorder = Recorder::new(Some(path.clone()));
        let mut idle = snapshot();
        idle.ranks.remove(0);
        recorder.record(&idle, true);
        assert!(!path.exists());
        recorder.record(&snapshot(), false);
        let first = Told { rank: 0, host: "node0".into(), pid: 4711, steps: 812, trained: 20., waited: Some(5.) };
        let fresh = Told { rank: 1, steps: 0, trained: 0., waited: None, ..first.clone() };
        assert_eq!(lines()[0].ranks, [first, fresh]);
        let mut next = snapshot();
        next.run.restarts = 2;
        // It is too early; then it is not; then it is known.
        recorder.interval = Duration::from_secs(3600);
        recorder.record(&next, false);
        assert_eq!(lines().len(), 1);
        recorder.record(&next, true);
        recorder.record(&next, true);
        assert_eq!(lines().iter().map(|line| line.restarts).collect::<Vec<_>>(), [1, 2]);
    }

    #[test]
    fn lines_become_rare_in_a_long_run() {
        let folder = tempfile::tempdir().unwrap();
        let mut recorder = Recorder::new(Some(folder.path().join(RECORD)));
        let mut long = snapshot();
        for step in 0..3 {
            let told = long.ranks[0].1.as_mut().unwrap();
            (told.steps, told.host) = (step, "x".repeat(DOUBLING));
            recorder.record(&long, true);
        }
        assert_eq!(recorder.interval, 4 * INTERVAL);
    }

    /// The folder may be a group's.
    #[test]
    fn nothing_is_written_through_a_link() {
        let folder = tempfile::tempdir().unwrap();
        let other = folder.path().join("precious");
        std::fs::write(&other, "as it was").unwrap();
        std::os::unix::fs::symlink(&other, folder.path().join(RECORD)).unwrap();
        let mut recorder = Recorder::new(Some(folder.path().join(RECORD)));
        recorder.record(&snapshot(), true);
        assert_eq!((recorder.path, std::fs::read_to_string(other).unwrap()), (None, "as it was".to_string()));
    }

    #[test]
    fn a_file_that_cannot_be_written_is_given_up() {
        let mut recorder = Recorder::new(Some(PathBuf::from("/nowhere/at/all")));
        recorder.record(&snapshot(), true);
        assert_eq!(recorder.path, None);
    }
}
