//! The verdict on a failure: which rank or node has caused it, how, and the evidence.
//!
//! It is decided once, when the processes concerned have ended. The summary that ddprun prints, `verdict.json`, the report page,
//! the status and the metrics of the run show this datum, and decide nothing.
mod file;

pub(crate) use file::{ERROR_FILE, Outcome, Record, VERDICT, Verdicts, WorkerError, read_error};

use candle_ddp_rendezvous::json::encode;
use candle_ddp_rendezvous::milliseconds;
use serde::{Deserialize, Serialize};
use signal_hook::consts::{SIGABRT, SIGKILL};
use std::fmt::Write;
use std::time::SystemTime;

/// Explains a SIGKILL that ddprun did not send.
const PERHAPS_MEMORY: &str =
    "\n  SIGKILL often means that memory ran out: see dmesg, or the memory limit of the container or job";
const OUT_OF_MEMORY: &str = "\n  memory ran out: the kernel has counted a kill for that reason in the control group of this \
                             run. Give the job more memory, or let each rank use less";

/// A failure. What is unknown is `None`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Verdict {
    /// When, in milliseconds since 1970.
    pub(crate) at: u64,
    /// The rank to blame, unless it is a node, or the whole run.
    pub(crate) rank: Option<usize>,
    /// The rank of its node, and the node's host. The host is unknown if only ranks of other nodes have named the rank.
    pub(crate) node: Option<usize>,
    pub(crate) host: Option<String>,
    pub(crate) how: How,
    /// The exit code of its process, or the signal that killed it.
    pub(crate) exit: Option<i32>,
    pub(crate) signal: Option<i32>,
    /// The variant of the error that says so, or `Program`, if a rank has told one.
    pub(crate) cause: Option<String>,
    /// The rank whose error that is, if it is another one.
    pub(crate) told_by: Option<usize>,
    /// ddprun's exit code if the run ends with this failure.
    pub(crate) code: u8,
    /// The failure in a sentence.
    pub(crate) text: String,
    pub(crate) evidence: Evidence,
}

/// How a rank or a node has failed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum How {
    /// Only ranks of other nodes know.
    #[default]
    Unknown,
    /// The process exited with a code other than 0.
    Exit,
    /// A signal killed the process.
    Signal,
    /// The kernel killed the process, since memory had run out.
    OutOfMemory,
    /// The process did not end, but others failed because of it.
    Hang,
    /// The process exited with 0 while others needed it.
    Left,
    /// The workers could not be started, or a node did not join.
    NotStarted,
    /// A node gave no sign of life, lost its connection, or left.
    Lost,
    /// ddprun received a signal.
    Stopped,
}

/// The evidence for a failure.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Evidence {
    /// The process that has failed, or reported it, with the times: what follows is about it.
    pub(crate) process: String,
    /// The error that it reported.
    pub(crate) error: Option<String>,
    /// An error that it printed before its last lines.
    pub(crate) printed: Option<String>,
    /// Its last lines; `None` if it wrote none, or if it was restarted.
    pub(crate) lines: Option<Vec<String>>,
    /// Its files on its host.
    pub(crate) files: Vec<String>,
    /// The explanation of the flight records on its host: the last calls of the ranks.
    pub(crate) calls: Vec<String>,
}

impl How {
    /// Its name in documents.
    pub(crate) fn name(self) -> String {
        String::from_utf8_lossy(&encode(&self)).trim_matches('"').to_string()
    }
}

impl Verdict {
    /// A failure now, in a sentence.
    pub(crate) fn now(how: How, code: u8, text: impl Into<String>) -> Self {
        Self { at: milliseconds(SystemTime::now()), how, code, text: text.into(), ..Self::default() }
    }

    /// Without the evidence, for documents that many read.
    pub(crate) fn in_short(&self) -> Self {
        Self { evidence: Evidence::default(), ..self.clone() }
    }

    /// Whether the process was killed from outside, or by its own fault, such as a segmentation fault. SIGABRT does not count,
    /// because processes also abort because of others.
    pub(crate) fn is_killed(&self) -> bool {
        matches!(self.how, How::Signal | How::OutOfMemory) && self.signal != Some(SIGABRT)
    }

    /// The rank on another node that only the error of [a rank of this one](Self::witness) names.
    pub(crate) fn elsewhere(&self) -> Option<usize> {
        self.rank.filter(|_| self.host.is_none())
    }

    /// The rank about which there is evidence.
    pub(crate) fn witness(&self) -> Option<usize> {
        if self.host.is_none() { self.told_by } else { self.rank }
    }

    /// The failure with its evidence, as ddprun prints it.
    pub(crate) fn summary(&self) -> String {
        let Evidence { process, error, printed, lines, .. } = &self.evidence;
        if process.is_empty() {
            return self.text.clone();
        }
        let mut text = match process.starts_with(&self.text) {
            true => process.clone(),
            false => format!("{}\n{process}", self.text),
        };
        text += match (self.how, self.signal) {
            (How::OutOfMemory, _) => OUT_OF_MEMORY,
            (How::Signal, Some(SIGKILL)) => PERHAPS_MEMORY,
            _ => "",
        };
        if let Some(error) = error {
            section(&mut text, "its error:", error.lines());
        } else if let Some(printed) = printed {
            section(&mut text, "its last error:", printed.lines());
        }
        // A program also prints its error.
        let is_new = |line: &&str| {
            let known = error.iter().flat_map(|error| error.lines());
            !known.filter(|known| !known.is_empty()).any(|known| line.contains(known))
        };
        match lines {
            None => text += "\n  it wrote no output",
            Some(lines) => {
                let mut new = lines.iter().map(String::as_str).filter(is_new).peekable();
                if new.peek().is_some() {
                    section(&mut text, "its last lines:", new);
                }
            }
        }
        text
    }
}

/// Adds a section to a text.
pub(crate) fn section<'a>(text: &mut String, title: &str, lines: impl Iterator<Item = &'a str>) {
    let _ = write!(text, "\n  {title}");
    for line in lines {
        let _ = write!(text, "\n    {line}");
    }
}
