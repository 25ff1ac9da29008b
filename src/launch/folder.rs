//! The run's folder: log files, and the files in which workers leave their errors.
use super::config::Config;
use crate::{Error, Result};
use std::fs::{DirBuilder, File};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// An error file is not read further.
const LONGEST_ERROR: u64 = 1 << 20;

/// `LOG_DIR/RUN_ID/attempt_0/LOCAL_RANK/…`, torchrun's layout. Temporary unless there are log files in it.
#[derive(Debug)]
pub(super) struct RunFolder {
    path: PathBuf,
    keep: bool,
}

impl RunFolder {
    /// Creates the folders of all workers.
    pub(super) fn create(config: &Config) -> Result<Self> {
        let workers = config.topology.local_world_size;
        let files = (0..workers).any(|rank| config.redirects.of(rank).any() || config.tee.of(rank).any());
        let path = match &config.log_dir {
            Some(dir) => {
                let dir = std::path::absolute(dir).map_err(|error| io_error(dir, error))?;
                std::fs::create_dir_all(&dir).map_err(|error| io_error(&dir, error))?;
                create_new(&dir, &config.run_id, 0o777)?
            }
            None => create_new(&std::env::temp_dir(), &format!("ddprun-{}", config.run_id), 0o700)?,
        };
        let folder = Self { path, keep: config.log_dir.is_some() || files };
        for rank in 0..workers {
            let path = folder.worker(rank);
            std::fs::create_dir_all(&path).map_err(|error| io_error(&path, error))?;
        }
        if files {
            super::message(format_args!("log files are in {}", folder.path.display()));
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
        if !self.keep {
            // A temporary folder that cannot be removed is the system's to clean.
            let _ = std::fs::remove_dir_all(&self.path);
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
