//! The run's folder: log files, and the files in which workers leave their errors.
use super::config::Config;
use super::console::message;
use super::error::{Error, Result};
use rustix::fs::{FlockOperation, flock};
use std::fs::{DirBuilder, File, remove_dir, remove_dir_all, remove_file};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// An error file is not read further.
const LONGEST_ERROR: u64 = 1 << 20;

/// `LOG_DIR/RUN_ID/attempt_0/LOCAL_RANK/…`, torchrun's layout. Temporary unless there are log files in it.
#[derive(Debug)]
pub(super) struct RunFolder {
    path: PathBuf,
    workers: usize,
    /// The lock on a temporary folder, which says that its run is alive; `None` for a folder that is kept.
    temporary: Option<File>,
}

impl RunFolder {
    /// Creates the folders of all workers.
    pub(super) fn create(config: &Config) -> Result<Self> {
        let workers = config.topology.local_world_size;
        let files = (0..workers).any(|rank| config.redirects.of(rank).any() || config.tee.of(rank).any());
        let (path, temporary) = match &config.log_dir {
            Some(dir) => {
                let dir = std::path::absolute(dir).map_err(|error| io_error(dir, error))?;
                std::fs::create_dir_all(&dir).map_err(|error| io_error(&dir, error))?;
                (create_new(&dir, &config.run_id, 0o777)?, None)
            }
            None if files => (create_new(&std::env::temp_dir(), &format!("ddprun-{}", config.run_id), 0o700)?, None),
            None => {
                let prefix = temporary_prefix();
                remove_stale(&std::env::temp_dir(), &prefix);
                let (path, lock) = create_locked(&std::env::temp_dir(), &format!("{prefix}{}", config.run_id))?;
                (path, Some(lock))
            }
        };
        let folder = Self { path, workers, temporary };
        for rank in 0..workers {
            let path = folder.worker(rank);
            std::fs::create_dir_all(&path).map_err(|error| io_error(&path, error))?;
        }
        if files {
            message(format_args!("log files are in {}", folder.path.display()));
        }
        Ok(folder)
    }

    fn worker(&self, local_rank: usize) -> PathBuf {
        self.path.join("attempt_0").join(local_rank.to_string())
    }

    /// A new log file of a worker.
    pub(super) fn log_file(&self, local_rank: usize, name: &str) -> Result<(PathBuf, File)> {
        let path = self.worker(local_rank).join(name);
        let file = File::create_new(&path).map_err(|error| io_error(&path, error))?;
        Ok((path, file))
    }

    /// Where a worker may leave its error.
    pub(super) fn error_file(&self, local_rank: usize) -> PathBuf {
        self.worker(local_rank).join("error.json")
    }

    /// The error that a worker left, in torchrun's format; otherwise whatever text it left.
    pub(super) fn error(&self, local_rank: usize) -> Option<String> {
        let mut bytes = Vec::new();
        File::open(self.error_file(local_rank)).ok()?.take(LONGEST_ERROR).read_to_end(&mut bytes).ok()?;
        let text = String::from_utf8_lossy(&bytes);
        let json: Option<serde_json::Value> = serde_json::from_str(&text).ok();
        let message = json.as_ref().and_then(|json| json.get("message"));
        let inner = message.and_then(|message| message.get("message")).or(message).and_then(|inner| inner.as_str());
        Some(inner.unwrap_or(&text).trim().to_owned()).filter(|message| !message.is_empty())
    }
}

impl Drop for RunFolder {
    fn drop(&mut self) {
        if self.temporary.is_none() {
            return;
        }
        // One by one, since `remove_dir_all` needs file descriptors, of which there may be none left. A folder that
        // cannot be removed is left to the next run.
        for rank in 0..self.workers {
            let _ = remove_file(self.error_file(rank));
            let _ = remove_dir(self.worker(rank));
        }
        let _ = remove_dir(self.path.join("attempt_0"));
        if remove_dir(&self.path).is_err() {
            let _ = remove_dir_all(&self.path);
        }
    }
}

/// How the names of temporary folders begin. A lock is seen by all processes of this system, so its boot is in the name;
/// a folder that is kept has another name, whatever its run is called.
fn temporary_prefix() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    format!("ddprun.tmp-{}-", boot.split('-').next().unwrap_or_default().trim())
}

/// Removes the temporary folders of runs that were killed: those that nobody has locked.
fn remove_stale(parent: &Path, prefix: &str) {
    for entry in std::fs::read_dir(parent).into_iter().flatten().flatten() {
        let ours = entry.file_name().to_string_lossy().starts_with(prefix)
            && entry
                .metadata()
                .is_ok_and(|metadata| metadata.is_dir() && metadata.uid() == rustix::process::geteuid().as_raw());
        if ours
            && let Ok(folder) = File::open(entry.path())
            && flock(&folder, FlockOperation::NonBlockingLockExclusive).is_ok()
        {
            // What cannot be removed now, is tried again by the next run.
            let _ = remove_dir_all(entry.path());
        }
    }
}

/// Creates a folder and locks it.
fn create_locked(parent: &Path, name: &str) -> Result<(PathBuf, File)> {
    loop {
        let path = create_new(parent, name, 0o700)?;
        let locked = File::open(&path).and_then(|folder| {
            // Another ddprun may be looking at it. Where there are no locks, none is taken for stale either.
            let _ = flock(&folder, FlockOperation::LockExclusive);
            Ok((folder.metadata()?.ino(), folder))
        });
        match locked {
            Ok((inode, lock)) if std::fs::metadata(&path).is_ok_and(|now| now.ino() == inode) => {
                return Ok((path, lock));
            }
            // Another ddprun has taken it for stale and removed it.
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => {
                let _ = remove_dir(&path);
                return Err(io_error(&path, error));
            }
        }
    }
}

/// Creates `name` in `parent`; `name_2` and so on when it is taken, so that no run overwrites another's files.
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
    Error::io(format!("cannot create {}, for the run's log and error files (see --log-dir)", path.display()), error)
}
