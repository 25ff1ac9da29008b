//! The run's folder: log files, and the files to which workers write their errors.
use crate::command::Config;
use crate::console::message;
use crate::error::{Error, Result};
use crate::verdict::{ERROR_FILE, WorkerError, read_error};
use candle_ddp_base::host::boot_id;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::{DirBuilder, File, Metadata, remove_dir, remove_dir_all, remove_file};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The files of its output.
pub(crate) const STDOUT: &str = "stdout.log";
pub(crate) const STDERR: &str = "stderr.log";
/// `LOG_DIR/RUN_ID/attempt_RESTARTS/LOCAL_RANK/…`, torchrun's layout. Temporary unless it contains log files.
#[derive(Debug)]
pub(crate) struct RunFolder {
    /// `None` if no folder could be made, and none is necessary.
    path: Option<PathBuf>,
    workers: usize,
    /// The lock that marks a temporary folder as in use; `None` for a folder that is kept.
    temporary: Option<File>,
}

impl RunFolder {
    /// Creates the folders of all workers.
    pub(crate) fn create(config: &Config) -> Result<Self> {
        let workers = config.topology.local_world_size();
        let files =
            (0..workers).any(|rank| config.options.redirects.of(rank).any() || config.options.tee.of(rank).any());
        let (path, temporary) = match &config.options.log_dir {
            Some(dir) => (create_in(dir, &config.run_id)?, None),
            None if files => (create_new(&std::env::temp_dir(), &format!("ddprun-{}", config.run_id), 0o700)?, None),
            None => {
                return Ok(Self::temporary(&config.run_id, workers).unwrap_or_else(|error| {
                    message(format_args!(
                        "{error}. Without one, the reason why a rank has failed is only in its output"
                    ));
                    Self { path: None, workers, temporary: None }
                }));
            }
        };
        let folder = Self { path: Some(path), workers, temporary };
        (0..workers).try_for_each(|rank| folder.prepare(0, rank).map(drop))?;
        if let Some(path) = folder.path.as_ref().filter(|_| files) {
            message(format_args!("log files are in {}", path.display()));
        }
        Ok(folder)
    }

    /// A folder for the errors of workers, which is removed after the run.
    fn temporary(run_id: &str, workers: usize) -> Result<Self> {
        let prefix = temporary_prefix();
        remove_stale(&std::env::temp_dir(), &prefix);
        let (path, lock) = create_locked(&std::env::temp_dir(), &format!("{prefix}{run_id}"))?;
        let folder = Self { path: Some(path), workers, temporary: Some(lock) };
        (0..workers).try_for_each(|rank| folder.prepare(0, rank).map(drop))?;
        Ok(folder)
    }

    fn worker(&self, restart_count: u32, local_rank: usize) -> Option<PathBuf> {
        Some(self.path.as_ref()?.join(format!("attempt_{restart_count}")).join(local_rank.to_string()))
    }

    /// Creates the folder of a worker that is started after `restart_count` restarts. Returns the path to which it may write its error.
    pub(crate) fn prepare(&self, restart_count: u32, local_rank: usize) -> Result<Option<PathBuf>> {
        let Some(path) = self.worker(restart_count, local_rank) else { return Ok(None) };
        std::fs::create_dir_all(&path).map_err(|error| io_error(&path, error))?;
        // An error that an earlier worker wrote there is not this one's.
        let error_file = path.join(ERROR_FILE);
        match remove_file(&error_file) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(io_error(&path, error)),
            _ => Ok(Some(error_file)),
        }
    }

    /// Creates a log file for a worker.
    pub(crate) fn log_file(&self, restart_count: u32, local_rank: usize, name: &str) -> Result<(PathBuf, File)> {
        let folder = self.worker(restart_count, local_rank).unwrap_or_default();
        let path = folder.join(name);
        let file = File::create_new(&path).map_err(|error| io_error(&path, error))?;
        Ok((path, file))
    }

    /// A file of the run, if its folder is kept.
    pub(crate) fn kept(&self, name: &str) -> Option<PathBuf> {
        Some(self.path.as_ref().filter(|_| self.temporary.is_none())?.join(name))
    }

    /// The files that a worker has left.
    pub(crate) fn files(&self, restart_count: u32, local_rank: usize) -> Vec<String> {
        let folder = self.worker(restart_count, local_rank).filter(|_| self.temporary.is_none());
        let files = folder.iter().flat_map(|folder| [ERROR_FILE, STDOUT, STDERR].map(|name| folder.join(name)));
        files.filter(|file| file.exists()).map(|file| file.display().to_string()).collect()
    }

    /// Returns the error that a worker wrote.
    pub(crate) fn error(&self, restart_count: u32, local_rank: usize) -> Option<WorkerError> {
        read_error(&self.worker(restart_count, local_rank)?.join(ERROR_FILE)).ok().flatten()
    }
}

impl Drop for RunFolder {
    fn drop(&mut self) {
        let Some(path) = self.path.as_ref().filter(|_| self.temporary.is_some()) else { return };
        // `remove_dir_all` needs file descriptors, which may have run out, so remove entries one by one. The next run
        // removes a folder that cannot be removed now.
        for folder in (0..self.workers).filter_map(|rank| self.worker(0, rank)) {
            let _ = remove_file(folder.join(ERROR_FILE));
            let _ = remove_dir(folder);
        }
        let _ = remove_dir(path.join("attempt_0"));
        if remove_dir(path).is_err() {
            let _ = remove_dir_all(path);
        }
    }
}

/// Returns the prefix of temporary folders' names. It contains the boot id, because all processes of a boot see the
/// same locks. A folder that is kept never has this prefix, whatever the run id is.
fn temporary_prefix() -> String {
    format!("ddprun.tmp-{}-", boot_id().split('-').next().unwrap_or_default())
}

/// Removes temporary folders of killed runs: those that are not locked.
fn remove_stale(parent: &Path, prefix: &str) {
    for entry in std::fs::read_dir(parent).into_iter().flatten().flatten() {
        let ours = entry.file_name().to_string_lossy().starts_with(prefix)
            && entry
                .metadata()
                .is_ok_and(|metadata| metadata.is_dir() && metadata.uid() == rustix::process::geteuid().as_raw());
        if ours
            && let Ok(folder) = File::open(entry.path())
            && flock(&folder, FlockOperation::NonBlockingLockExclusive).is_ok()
            // Between the opening and the lock, another ddprun may have removed the folder, and a third one created its own.
            && is_at(&folder, &entry.path())
        {
            // The next run tries again to remove what cannot be removed now.
            let _ = remove_dir_all(entry.path());
        }
    }
}

/// Creates a folder and locks it.
fn create_locked(parent: &Path, name: &str) -> Result<(PathBuf, File)> {
    loop {
        let path = create_new(parent, name, 0o700)?;
        let locked = File::open(&path).map(|folder| {
            // On a file system without locks, no folder is considered stale.
            let is_taken = flock(&folder, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK);
            (is_taken, folder)
        });
        match locked {
            Ok((false, lock)) if is_at(&lock, &path) => return Ok((path, lock)),
            // Another ddprun considered the folder stale: it is about to remove it, or has removed it, and perhaps has even
            // created its own with the same name.
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => {
                let _ = remove_dir(&path);
                return Err(io_error(&path, error));
            }
        }
    }
}

/// Whether the open `folder` is still the one at `path`.
fn is_at(folder: &File, path: &Path) -> bool {
    let inode = |metadata: Metadata| (metadata.dev(), metadata.ino());
    folder.metadata().is_ok_and(|open| std::fs::metadata(path).is_ok_and(|now| inode(now) == inode(open)))
}

/// Creates the folder of a run in the folder of --log-dir.
pub(crate) fn create_in(dir: &Path, run_id: &str) -> Result<PathBuf> {
    let dir = std::path::absolute(dir).map_err(|error| io_error(dir, error))?;
    std::fs::create_dir_all(&dir).map_err(|error| io_error(&dir, error))?;
    create_new(&dir, run_id, 0o777)
}

/// Creates `name` in `parent`, or `name_2` and so on if it exists, so that no run overwrites another's files.
fn create_new(parent: &Path, name: &str, mode: u32) -> Result<PathBuf> {
    let mut number = 1_u32;
    loop {
        let path = parent.join(if number == 1 { name.to_owned() } else { format!("{name}_{number}") });
        match DirBuilder::new().mode(mode).create(&path) {
            Ok(()) => return Ok(path),
            Err(error) if error.kind() == ErrorKind::AlreadyExists && number < 100_000 => number += 1,
            Err(error) => return Err(io_error(&path, error)),
        }
    }
}

fn io_error(path: &Path, error: std::io::Error) -> Error {
    let remedy = "give a folder that can be written by --log-dir or TMPDIR";
    Error::io(format!("cannot create {} for the run's log and error files ({remedy})", path.display()), error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;

    /// Those that start at once remove each other's folders, which do not look used until they are locked.
    #[test]
    fn runs_that_start_at_once_get_folders_of_their_own() {
        let parent = tempfile::tempdir().unwrap();
        let all = Barrier::new(4);
        let create = || {
            let mut errors = Vec::new();
            for _ in 0..300 {
                remove_stale(parent.path(), "run");
                let created = create_locked(parent.path(), "run");
                // Each keeps its folder until all have one.
                all.wait();
                let removed = created.and_then(|(path, lock)| {
                    remove_dir(&path).map_err(|error| io_error(&path, error))?;
                    drop(lock);
                    Ok(())
                });
                // A thread that panics here would leave the others waiting.
                errors.extend(removed.err().map(|error| error.to_string()));
                all.wait();
            }
            errors
        };
        let errors = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(create)).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        assert!(errors.is_empty(), "{errors:?}");
    }
}
