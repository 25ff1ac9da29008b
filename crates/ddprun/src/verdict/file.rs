//! The files about failures: `error.json`, the error that a worker has written for its launcher, and `verdict.json`, why a run has
//! failed, or the failures that it has survived.
use super::Verdict;
use crate::console::message;
use crate::tail::plain;
use candle_ddp_base::file::{PreparedFile, Progress, open_left};
use candle_ddp_rendezvous::error::RankError;
use candle_ddp_rendezvous::json::encode;
use serde::{Deserialize, Serialize};
use std::io::{Error, ErrorKind, Read, Result};
use std::path::{Path, PathBuf};

/// The file of a worker's error.
pub(crate) const ERROR_FILE: &str = "error.json";
/// The maximum number of bytes read from it.
const LONGEST_ERROR: u64 = 1 << 20;

/// The verdict's file in the run's folder.
pub(crate) const VERDICT: &str = "verdict.json";
/// Raised when a field changes its meaning or is removed.
const SCHEMA: u32 = 1;
/// The most failures in it, of which the newest count, and the most bytes.
const MOST: usize = 64;
const LONGEST: u64 = 16 << 20;

/// Returns the error that a worker wrote to the file, if it wrote one.
pub(crate) fn read_error(file: &Path) -> Result<Option<WorkerError>> {
    match read(file, LONGEST_ERROR) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        bytes => Ok(WorkerError::parse(&String::from_utf8_lossy(&bytes?))),
    }
}

/// The first bytes of a file that a run has left.
fn read(file: &Path, most: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_left(file)?.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The content of a worker's error file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WorkerError {
    pub(crate) message: String,
    /// The error's cause, if the worker's program uses candle-ddp.
    pub(crate) told: Option<RankError>,
}

impl WorkerError {
    /// Parses torchrun's format, or takes plain text as it is.
    fn parse(text: &str) -> Option<Self> {
        let json: Option<serde_json::Value> = serde_json::from_str(text).ok();
        let message = json.as_ref().and_then(|json| json.get("message"));
        let inner = message.and_then(|message| message.get("message")).or(message).and_then(|inner| inner.as_str());
        let message = plain(inner.unwrap_or(text)).trim().to_owned();
        let told = json.as_ref().and_then(RankError::of_json);
        (!message.is_empty()).then_some(Self { message, told })
    }

    /// The rank that made the worker fail, if its program knows.
    pub(crate) fn culprit(&self) -> Option<usize> {
        self.told.as_ref()?.culprit
    }
}

/// The verdict's file: the last failure of a run, and those before.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) schema: u32,
    pub(crate) run_id: String,
    pub(crate) outcome: Outcome,
    /// How often any worker was restarted.
    pub(crate) restarts: u32,
    #[serde(flatten)]
    pub(crate) last: Verdict,
    /// The failures before the last one, the oldest first.
    pub(crate) earlier: Vec<Verdict>,
}

/// How the run continued after the last failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Outcome {
    /// It has ended with it.
    Failed,
    /// It continues, after a restart or without the rank; unless ddprun itself was killed since.
    Continues,
    /// It has ended well.
    Succeeded,
}

impl Record {
    /// Reads the file.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        serde_json::from_slice(&read(path, LONGEST)?).map_err(Error::other)
    }
}

/// The failures of a run so far. Each is written to its file at once.
#[derive(Debug)]
pub(crate) struct Verdicts {
    /// `None` if the run leaves no folder, or the file could not be written.
    path: Option<PathBuf>,
    run_id: String,
    /// The newest is the last.
    list: Vec<Verdict>,
}

impl Verdicts {
    pub(crate) fn new(path: Option<PathBuf>, run_id: &str) -> Self {
        Self { path, run_id: run_id.to_string(), list: Vec::new() }
    }

    /// The last failure.
    pub(crate) fn last(&self) -> Option<&Verdict> {
        self.list.last()
    }

    /// Records a failure, and how the run continues.
    pub(crate) fn add(&mut self, verdict: Verdict, outcome: Outcome, restarts: u32) {
        if self.list.len() == MOST {
            self.list.remove(0);
        }
        self.list.push(verdict);
        self.write(outcome, restarts);
    }

    /// Records that the run has ended well, if anything has failed before.
    pub(crate) fn succeed(&mut self, restarts: u32) {
        self.write(Outcome::Succeeded, restarts);
    }

    fn write(&mut self, outcome: Outcome, restarts: u32) {
        let (Some(path), Some((last, earlier))) = (&self.path, self.list.split_last()) else { return };
        let (run_id, last, earlier) = (self.run_id.clone(), last.clone(), earlier.to_vec());
        let text = [encode(&Record { schema: SCHEMA, run_id, outcome, restarts, last, earlier }), vec![b'\n']].concat();
        let written = PreparedFile::create_over_links(path).and_then(|file| {
            file.fill(&Progress::default(), |to| to.write_all(&text))?;
            file.commit()
        });
        if let Err(error) = written {
            message(format_args!("there will be no {VERDICT}: {error}"));
            self.path = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verdict::{Evidence, How};

    #[test]
    fn the_file_has_all_failures_and_what_became_of_the_run() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(VERDICT);
        let mut verdicts = Verdicts::new(Some(path.clone()), "night");
        verdicts.succeed(0);
        assert!(!path.exists());
        let evidence = Evidence { process: "rank 1".into(), lines: Some(vec!["no".into()]), ..Evidence::default() };
        let first = Verdict {
            rank: Some(1),
            exit: Some(7),
            evidence,
            ..Verdict::now(How::Exit, 7, "rank 1 exited with code 7")
        };
        verdicts.add(first.clone(), Outcome::Continues, 1);
        let read = || Record::read(&path).unwrap();
        assert_eq!((read().outcome, read().last, read().earlier), (Outcome::Continues, first.clone(), vec![]));
        let second = Verdict::now(How::Lost, 1, "node 1 is gone");
        verdicts.add(second.clone(), Outcome::Failed, 1);
        let expected = Record {
            schema: 1,
            run_id: "night".into(),
            outcome: Outcome::Failed,
            restarts: 1,
            last: second,
            earlier: vec![first],
        };
        assert_eq!(read(), expected);
        verdicts.succeed(2);
        assert_eq!((read().outcome, read().restarts), (Outcome::Succeeded, 2));
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.starts_with(r#"{"schema":1,"run_id":"night","outcome":"succeeded","restarts":2,"at":"#), "{text}");
        (0..2 * MOST).for_each(|_| verdicts.add(Verdict::now(How::Lost, 1, "again"), Outcome::Continues, 3));
        assert_eq!(read().earlier.len(), MOST - 1);
        // A file that cannot be written is given up, and the run goes on.
        let mut verdicts = Verdicts::new(Some(folder.path().join("missing").join(VERDICT)), "night");
        verdicts.add(Verdict::default(), Outcome::Failed, 0);
        assert_eq!((verdicts.path.as_ref(), verdicts.last()), (None, Some(&Verdict::default())));
    }
}
