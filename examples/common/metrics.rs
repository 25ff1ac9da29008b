//! The metrics file: one JSON object per line, written by rank 0.
use candle_ddp::{Context, ProcessGroup, Result};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

pub(crate) struct Metrics(Option<(PathBuf, File)>);

impl Metrics {
    /// Creates the file on rank 0, if there is a `path`. A run that is resumed appends to it.
    pub(crate) fn create(pg: &ProcessGroup, path: Option<&Path>, resume: bool) -> Result<Self> {
        let Some(path) = path.filter(|_| pg.rank() == 0) else { return Ok(Self(None)) };
        let file = match resume {
            true => OpenOptions::new().create(true).append(true).open(path),
            false => File::create(path),
        };
        Ok(Self(Some((path.to_path_buf(), file.with_context(|| writing(path))?))))
    }

    pub(crate) fn write(&mut self, line: &serde_json::Value) -> Result<()> {
        match &mut self.0 {
            Some((path, file)) => writeln!(file, "{line}").with_context(|| writing(path)),
            None => Ok(()),
        }
    }
}

fn writing(path: &Path) -> String {
    format!("cannot write the metrics to {}", path.display())
}
