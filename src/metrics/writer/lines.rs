//! JSON lines.
use super::appended::{Appended, is_shared, writing};
use super::field::{Field, Position};
use crate::{Context, Result};
use serde_json::{Map, Value};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

#[derive(Debug)]
pub(super) struct Lines(Appended);

impl Lines {
    /// The file without the lines from `purge_step` on, and without a line that a killed process has torn off, unless another writer
    /// is at it.
    pub(super) fn open(path: &Path, purge_step: u64) -> Result<Self> {
        let mut file = Appended::continued(path)?;
        if file.is_regular() && !is_shared(file.file(), file.path()) {
            let kept = kept(BufReader::new(file.file()), purge_step).with_context(|| writing(file.path()))?;
            file.truncate(kept)?;
        }
        Ok(Self(file))
    }

    pub(super) fn write(&mut self, fields: &[(&str, Field<'_>)]) -> Result<()> {
        let line: Map<String, Value> =
            fields.iter().map(|(name, field)| (name.to_string(), Value::from(*field))).collect();
        self.0.append(format!("{}\n", Value::Object(line)).as_bytes())
    }

    pub(super) fn flush(&self) -> Result<()> {
        self.0.flush()
    }
}

/// The most bytes of a line that counts: reading a file that is something else takes no more memory.
const LONGEST: u64 = 1 << 20;

/// The number of bytes that come before the first line of the discarded steps, or of the torn end.
fn kept(mut file: impl BufRead, purge_step: u64) -> std::io::Result<u64> {
    let (mut kept, mut line) = (0, Vec::new());
    loop {
        line.clear();
        let len = file.by_ref().take(LONGEST).read_until(b'\n', &mut line)? as u64;
        let is_torn = line.last() != Some(&b'\n') && len < LONGEST;
        if is_torn || purge_step == 0 || position(&line).is_some_and(|position| position >= purge_step) {
            return Ok(kept);
        }
        kept += len;
    }
}

fn position(line: &[u8]) -> Option<u64> {
    let line: Map<String, Value> = serde_json::from_slice(line).ok()?;
    Position::NAMES.iter().find_map(|name| line.get(*name)?.as_u64())
}
