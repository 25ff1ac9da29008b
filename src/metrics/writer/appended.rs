//! A file that grows by whole records.
use crate::{Context, Error, Result};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Each record reaches the file by one write, so that a process that is killed leaves no half of it in memory. What a full disk cuts
/// off is removed again.
#[derive(Debug)]
pub(super) struct Appended {
    path: PathBuf,
    file: File,
    len: u64,
}

impl Appended {
    /// A new file. One that exists is an [`Error::Io`] of the kind `AlreadyExists`.
    pub(super) fn create_new(path: PathBuf) -> Result<Self> {
        Self::open(path, OpenOptions::new().create_new(true))
    }

    /// The file as it is, or a new one.
    pub(super) fn continued(path: &Path) -> Result<Self> {
        Self::open(path.to_path_buf(), OpenOptions::new().create(true).read(true))
    }

    fn open(path: PathBuf, options: &mut OpenOptions) -> Result<Self> {
        let mut open = || {
            let file = options.append(true).open(&path)?;
            let len = file.metadata()?.len();
            Ok((file, len))
        };
        let (file, len) = open().with_context(|| writing(&path))?;
        Ok(Self { path, file, len })
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Cuts the file off. A pipe has nothing to cut off.
    pub(super) fn truncate(&mut self, len: u64) -> Result<()> {
        if len < self.len {
            self.file.set_len(len).with_context(|| writing(&self.path))?;
            self.len = len;
        }
        Ok(())
    }

    pub(super) fn append(&mut self, record: &[u8]) -> Result<()> {
        if let Err(error) = self.file.write_all(record) {
            // The error counts, whether its record can be removed or not: readers take a torn end for the end.
            let _ = self.file.set_len(self.len);
            return Err(Error::io(writing(&self.path), error));
        }
        self.len += record.len() as u64;
        Ok(())
    }

    /// Waits until the disk has it.
    pub(super) fn flush(&self) -> Result<()> {
        match self.file.sync_data() {
            // A pipe, or a file system that cannot.
            Err(error) if error.kind() == std::io::ErrorKind::InvalidInput => Ok(()),
            result => result.with_context(|| writing(&self.path)),
        }
    }
}

pub(super) fn writing(path: &Path) -> String {
    format!("cannot write the metrics to {}", path.display())
}
