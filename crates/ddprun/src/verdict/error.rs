//! The error that a worker has written for its launcher.
use crate::tail::plain;
use candle_ddp_base::file::open_left;
use candle_ddp_rendezvous::error::RankError;
use std::io::{ErrorKind, Read};
use std::path::Path;

/// The file of a worker's error.
pub(crate) const ERROR_FILE: &str = "error.json";
/// The maximum number of bytes read from an error file.
const LONGEST_ERROR: u64 = 1 << 20;

/// Returns the error that a worker wrote to the file, if it wrote one.
pub(crate) fn read_error(file: &Path) -> std::io::Result<Option<WorkerError>> {
    let mut bytes = Vec::new();
    match open_left(file) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        file => file?.take(LONGEST_ERROR).read_to_end(&mut bytes)?,
    };
    Ok(WorkerError::parse(&String::from_utf8_lossy(&bytes)))
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
