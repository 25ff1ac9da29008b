//! The names and locks of temporary files.
use crate::random::random_bytes;
use crate::wire::beginning;
use std::ffi::OsStr;
use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

const SUFFIX: &str = ".tmp";
/// The number of random digits before the suffix.
const DIGITS: usize = 16;

/// The beginning of the names of temporary files for `target`. A long name is cut, so that the digits still fit.
pub(super) fn prefix(target: &OsStr) -> String {
    const LONGEST: usize = 100;
    let name = target.to_string_lossy();
    format!(".{}.", beginning(&name, LONGEST))
}

/// The beginning of `name`, if it names a temporary file.
fn prefix_of(name: &OsStr) -> Option<&str> {
    let name = name.to_str()?.strip_suffix(SUFFIX)?;
    let (prefix, digits) = name.split_at_checked(name.len().checked_sub(DIGITS)?)?;
    let is_temporary = prefix.len() > 2
        && prefix.starts_with('.')
        && prefix.ends_with('.')
        && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    is_temporary.then_some(prefix)
}

/// Whether `name` names a temporary file, for any target.
pub fn is_temporary(name: &OsStr) -> bool {
    prefix_of(name).is_some()
}

/// Whether `name` names a temporary file for `target`.
pub fn is_temporary_for(name: &OsStr, target: &OsStr) -> bool {
    prefix_of(name) == Some(&prefix(target))
}

/// A new name for a temporary file. It is random, because processes on other hosts, which write to the same folder, may
/// have the same process id.
pub fn temporary_name(target: &OsStr) -> io::Result<String> {
    let number = u64::from_le_bytes(random_bytes().map_err(io::Error::other)?);
    Ok(format!("{}{number:016x}{SUFFIX}", prefix(target)))
}

/// A new temporary file, and its path.
pub(super) fn create_locked(folder: &Path, target: &OsStr) -> io::Result<(File, PathBuf)> {
    // Another process that removes leftovers can only get between the first two steps.
    for _ in 0..100 {
        let temporary = folder.join(temporary_name(target)?);
        let file = File::create_new(&temporary)?;
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => continue,
            Err(TryLockError::Error(error)) => log::debug!("{} cannot be locked: {error}", temporary.display()),
            Ok(()) => {}
        }
        if file.metadata()?.nlink() > 0 {
            return Ok((file, temporary));
        }
    }
    Err(io::Error::other("another process keeps removing its temporary files as leftovers"))
}

/// Locks a leftover temporary file, so that no other write can start to use it. Returns `None` if it is being written,
/// or is gone.
pub fn lock_leftover(path: &Path) -> Option<File> {
    // NFS locks only files that are open for writing.
    let file = File::options().write(true).open(path).or_else(|_| File::open(path));
    let locked = file.and_then(|file| match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(error)) => Err(error),
    });
    match locked {
        Ok(locked) => locked,
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => {
            log::warn!(
                "{} may be a leftover of a killed write, but cannot be locked to find out ({error}): remove it if \
                 nothing writes to it",
                path.display()
            );
            None
        }
    }
}

/// Removes leftovers of killed writes to the same target. A leftover that cannot be removed does not prevent the write.
pub(super) fn remove_leftovers(folder: &Path, target: &OsStr) {
    let Ok(entries) = folder.read_dir() else { return };
    let files = entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_file()));
    for leftover in files.filter(|entry| is_temporary_for(&entry.file_name(), target)).map(|entry| entry.path()) {
        let Some(_lock) = lock_leftover(&leftover) else { continue };
        match std::fs::remove_file(&leftover) {
            Ok(()) => log::info!("removed {}, a leftover of a killed write", leftover.display()),
            Err(error) => log::debug!("{} cannot be removed: {error}", leftover.display()),
        }
    }
}
