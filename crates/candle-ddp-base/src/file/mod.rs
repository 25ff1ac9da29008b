//! Files that appear as a whole or not at all.
mod temporary;

pub use temporary::{is_temporary, is_temporary_for, lock_leftover, temporary_name};

use crate::{Error, Result};
use rustix::fs::OFlags;
use std::fs::{File, FileType};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A file that is written under a temporary name, which [`commit`](Self::commit) replaces by the final one. If it is
/// dropped before that, it is removed and the old file remains.
///
/// The temporary file lies next to the target as `.TARGET.<16 hex digits>.tmp` and is locked until it is renamed. An
/// unlocked one is left over from a killed process, and the next write to the same target removes it. On file systems
/// without locks, nothing is removed.
#[derive(Debug)]
pub struct PreparedFile {
    temporary: PathBuf,
    target: PathBuf,
    file: File,
    is_committed: bool,
}

impl PreparedFile {
    /// Writes a file with `write`. When this returns, the file is on the disk, under its temporary name.
    pub fn write(
        path: &Path,
        progress: &Progress,
        write: impl FnOnce(&mut dyn Rewrite) -> io::Result<()>,
    ) -> Result<Self> {
        let prepared = Self::create(path)?;
        prepared.fill(progress, write)?;
        Ok(prepared)
    }

    /// Lets `write` write the temporary file. When this returns, the file is on the disk.
    pub fn fill(&self, progress: &Progress, write: impl FnOnce(&mut dyn Rewrite) -> io::Result<()>) -> Result<()> {
        let mut writer = Writer { file: &self.file, progress, unsynchronized: 0 };
        write(&mut writer).and_then(|()| self.file.sync_all()).map_err(|error| writing(&self.target, error))
    }

    /// Creates an empty temporary file for `path`, for [`fill`](Self::fill). Follows symbolic links at `path`, and
    /// keeps the permissions of an existing file.
    pub fn create(path: &Path) -> Result<Self> {
        Self::create_at(path, follow_links(path).map_err(|source| writing(path, source))?, true)
    }

    /// Like [`create`](Self::create), but replaces a symbolic link itself, and keeps only the permissions of a file of this user.
    /// For names that the program has not chosen: somebody else may have put a link there that points to a file worth keeping, or
    /// a file that everybody may read.
    pub fn create_over_links(path: &Path) -> Result<Self> {
        Self::create_at(path, path.to_path_buf(), false)
    }

    fn create_at(path: &Path, target: PathBuf, keeps_any: bool) -> Result<Self> {
        let io = |source| writing(path, source);
        let Some(name) = target.file_name() else {
            return Err(Error::invalid("path", format!("{} does not name a file", path.display())));
        };
        let existing = match target.symlink_metadata() {
            Ok(existing) if existing.is_file() => Some(existing),
            Ok(existing) if existing.is_symlink() => None,
            Ok(_) => return Err(io(io::Error::other("it exists, but is not a regular file"))),
            Err(_) => None,
        };
        let folder = folder_of(&target);
        temporary::remove_leftovers(folder, name);
        let (file, temporary) = temporary::create_locked(folder, name).map_err(io)?;
        let prepared = Self { temporary, target, file, is_committed: false };
        if let Some(existing) = existing
            && (keeps_any || prepared.file.metadata().map_err(io)?.uid() == existing.uid())
        {
            prepared.file.set_permissions(existing.permissions()).map_err(io)?;
        }
        Ok(prepared)
    }

    /// Replaces the target, and returns the file, to write more to it.
    pub fn commit_open(self) -> Result<File> {
        let file = self.file.try_clone().map_err(|source| writing(&self.target, source))?;
        self.commit().map(|()| file)
    }

    /// Replaces the target.
    pub fn commit(mut self) -> Result<()> {
        let rename = std::fs::rename(&self.temporary, &self.target);
        self.is_committed = rename.is_ok();
        rename
            .and_then(|()| File::open(folder_of(&self.target))?.sync_all())
            .map_err(|source| writing(&self.target, source))
    }
}

impl Drop for PreparedFile {
    fn drop(&mut self) {
        if !self.is_committed {
            // If it cannot be removed now, the next write removes it.
            let _ = std::fs::remove_file(&self.temporary);
        }
    }
}

/// The most bytes of a file that a run leaves. Without a limit, a file with holes could take for ever to read.
const LARGEST: u64 = 1 << 36;

/// Opens a file that a run has left, to read it. Somebody else may have made its folder, so nothing but a regular file will do: a
/// link may lead to a file that is not theirs to show, and FIFOs and devices may keep the reader waiting, or have no end.
///
/// # Errors
/// Returns an error if it cannot be opened, is not a regular file, or has more than 64 GiB.
pub fn open_left(path: &Path) -> io::Result<File> {
    let wrong = |what: &str| io::Error::other(format!("it must be a regular file, and is {what}"));
    // The second flag keeps a FIFO from waiting for a writer. It has no effect on regular files.
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits();
    let file = match File::options().read(true).custom_flags(flags.cast_signed()).open(path) {
        Ok(file) => file,
        // A name that cannot be opened may be something else, too.
        Err(error) => match path.symlink_metadata().map(|there| there.file_type()) {
            Ok(kind) if !kind.is_file() => return Err(wrong(name_of(kind))),
            _ => return Err(error),
        },
    };
    let opened = file.metadata()?;
    match opened.file_type() {
        kind if !kind.is_file() => Err(wrong(name_of(kind))),
        _ if opened.len() > LARGEST => {
            Err(io::Error::other(format!("it has {} bytes, but must have at most {LARGEST}", opened.len())))
        }
        _ => Ok(file),
    }
}

fn name_of(kind: FileType) -> &'static str {
    match kind {
        kind if kind.is_symlink() => "a symbolic link",
        kind if kind.is_dir() => "a folder",
        kind if kind.is_fifo() => "a FIFO",
        kind if kind.is_socket() => "a socket",
        _ => "a device",
    }
}

/// The rank in the name of a rank's file: `rank`, the number, and this end. Other names may hold anything, line breaks
/// too.
pub fn rank_in(name: &str, end: &str) -> Option<usize> {
    let number = name.strip_prefix("rank")?.strip_suffix(end)?;
    number.bytes().all(|byte| byte.is_ascii_digit()).then_some(number)?.parse().ok()
}

/// Replaces a file with what `write` writes: other processes see the old file or the whole new one. Unlike a [`PreparedFile`], it
/// does not wait until the bytes are on the disk, and looks for no leftovers of killed processes, which are
/// [temporary files](is_temporary) as well. For caches, which check what they read.
pub fn replace_unsynced(path: &Path, write: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let (file, temporary) = temporary::create_locked(folder_of(path), name)?;
    let mut prepared = PreparedFile { temporary, target: path.to_path_buf(), file, is_committed: false };
    write(&mut prepared.file)?;
    std::fs::rename(&prepared.temporary, &prepared.target)?;
    prepared.is_committed = true;
    Ok(())
}

/// The progress of a write, for those who wait for it and may cancel it.
#[derive(Debug, Default)]
pub struct Progress {
    steps: AtomicU64,
    is_cancelled: AtomicBool,
}

impl Progress {
    /// A number that changes while the write makes progress.
    pub fn steps(&self) -> u64 {
        self.steps.load(Ordering::Relaxed)
    }

    /// Reports progress. Returns an error if the write was cancelled.
    pub fn step(&self) -> io::Result<()> {
        self.steps.fetch_add(1, Ordering::Relaxed);
        match self.is_cancelled.load(Ordering::Relaxed) {
            true => Err(io::Error::other("it was cancelled")),
            false => Ok(()),
        }
    }

    /// Lets the write fail at its next step.
    pub fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Relaxed);
    }
}

/// A file that is being written.
pub trait Rewrite: Write {
    /// Replaces bytes that were written before. What is written next still goes to the end.
    fn overwrite(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;
}

/// Writes in parts, to show progress.
struct Writer<'a> {
    file: &'a File,
    progress: &'a Progress,
    unsynchronized: usize,
}

impl Rewrite for Writer<'_> {
    fn overwrite(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, offset)
    }
}

impl Write for Writer<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        const PART: usize = 16 << 20;
        // Otherwise the system buffers a large file in memory, and the last call waits for the disk without visible
        // progress.
        const SYNCHRONIZED: usize = 1 << 30;
        self.progress.step()?;
        let written = self.file.write(&bytes[..bytes.len().min(PART)])?;
        self.unsynchronized += written;
        if self.unsynchronized >= SYNCHRONIZED {
            self.file.sync_data()?;
            self.unsynchronized = 0;
        }
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

fn writing(path: &Path, source: io::Error) -> Error {
    let context = match source.kind() {
        io::ErrorKind::NotFound => format!("writing {} (create the folder first)", path.display()),
        _ => format!("writing {}", path.display()),
    };
    Error::io(context, source)
}

/// The file to which `path` leads, which need not exist.
fn follow_links(path: &Path) -> io::Result<PathBuf> {
    let mut path = path.to_path_buf();
    // As many as Linux follows.
    for _ in 0..40 {
        let Ok(target) = path.read_link() else { return Ok(path) };
        path.pop();
        path.push(target);
    }
    Err(io::Error::other("there are too many symbolic links"))
}

fn folder_of(file: &Path) -> &Path {
    file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests;
