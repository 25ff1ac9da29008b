//! A file that grows by whole records.
use crate::warnings::warn_aloud;
use crate::{Context, Error, Result};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
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

    /// The file as it is, or a new one. A link may lead to a pipe or a device, but not to a file: it would be cut off.
    pub(super) fn continued(path: &Path) -> Result<Self> {
        let flags = OFlags::NOFOLLOW.bits().cast_signed();
        match Self::open(path.to_path_buf(), OpenOptions::new().create(true).read(true).custom_flags(flags)) {
            Err(Error::Io { error, .. }) if error.raw_os_error() == Some(Errno::LOOP.raw_os_error()) => {}
            opened => return opened,
        }
        let opened = Self::open(path.to_path_buf(), &mut OpenOptions::new())?;
        if opened.is_regular() {
            let reason = format!("{} must not be a symbolic link to a file: give the path of the file", path.display());
            return Err(Error::invalid("lines", reason));
        }
        Ok(opened)
    }

    pub(super) fn is_regular(&self) -> bool {
        self.file.metadata().is_ok_and(|metadata| metadata.is_file())
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
            // The error counts, whether its record can be removed or not: readers take a torn end for the end. Another writer may have
            // added to the file.
            let end = self.len + record.len() as u64;
            if self.file.metadata().is_ok_and(|metadata| metadata.len() < end) {
                let _ = self.file.set_len(self.len);
            }
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

/// Whether another writer has the file or the folder `path`, too, which is open as `file`. Until `file` is closed, others find this one.
pub(super) fn is_shared(file: &File, path: &Path) -> bool {
    let is_shared = matches!(file.try_lock(), Err(TryLockError::WouldBlock));
    // Not every file system has locks.
    let _ = file.try_lock_shared();
    if is_shared {
        warn_aloud(format_args!(
            "another metrics::Writer has {}, too, so that nothing of earlier runs is hidden there, and TensorBoard may read what the \
             older one writes from now on when it starts again only: give each writer its own",
            path.display()
        ));
    }
    is_shared
}

pub(super) fn writing(path: &Path) -> String {
    format!("cannot write the metrics to {}", path.display())
}
