//! The folder of a cache, which several processes may share.
use super::block::{SUFFIX, is_block};
use crate::tar::is_index;
use crate::{Error, Result};
use candle_ddp_base::file::{is_temporary, lock_leftover};
use candle_ddp_base::panic::lock;
use std::ffi::OsStr;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::SystemTime;

/// The part of the limit that a process writes before it lists the folder again.
const PART: u64 = 64;

pub(super) struct Folder {
    path: PathBuf,
    max_bytes: u64,
    /// The bytes that this cache has written since it listed the folder.
    written: Mutex<u64>,
}

impl Folder {
    /// Creates the folder if it does not exist. It is an error if there are other programs' files in it.
    pub(super) fn open(path: PathBuf, max_bytes: u64) -> Result<Self> {
        let context = |error| Error::io(format!("opening the folder of a cache, {}", path.display()), error);
        std::fs::create_dir_all(&path).map_err(context)?;
        for entry in path.read_dir().map_err(context)? {
            let entry = entry.map_err(context)?;
            let name = entry.file_name();
            // The indices of shards may lie there too, and are left alone.
            if !is_name_of_block(&name) && !is_temporary(&name) && !is_index(&entry.path()) {
                let reason = format!(
                    "the folder of a cache must have no other files, and {} has {name:?}: choose an empty folder, or remove \
                     what is not needed",
                    path.display()
                );
                return Err(Error::invalid("folder", reason));
            }
        }
        let folder = Self { path, max_bytes, written: Mutex::default() };
        folder.tidy().map_err(|error| Error::io(format!("tidying {}", folder.path.display()), error))?;
        Ok(folder)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Counts what was written, and removes the oldest blocks if there may be too many.
    pub(super) fn wrote(&self, bytes: u64) -> io::Result<()> {
        let mut written = lock(&self.written);
        *written = written.saturating_add(bytes);
        if *written < self.max_bytes / PART {
            return Ok(());
        }
        *written = 0;
        drop(written);
        self.tidy()
    }

    /// Removes what killed processes have left behind, and the oldest blocks that are too many.
    fn tidy(&self) -> io::Result<()> {
        let mut blocks: Vec<(SystemTime, u64, PathBuf)> = Vec::new();
        for entry in self.path.read_dir()? {
            let entry = entry?;
            let (name, path) = (entry.file_name(), entry.path());
            if is_name_of_block(&name) {
                // Another process may have removed it.
                if let Ok(metadata) = entry.metadata() {
                    blocks.push((metadata.modified()?, metadata.len(), path));
                }
            } else if is_temporary_block(&name)
                && let Some(_lock) = lock_leftover(&path)
            {
                remove(&path)?;
            }
        }
        let mut total: u64 = blocks.iter().map(|(_, len, _)| len).sum();
        blocks.sort_unstable();
        // The newest stays, so that a cache of one block has one.
        blocks.pop();
        for (_, len, path) in blocks {
            if total <= self.max_bytes {
                break;
            }
            // Somebody may have put another file there.
            if is_block(&path) {
                remove(&path)?;
            }
            total -= len;
        }
        Ok(())
    }
}

fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn is_name_of_block(name: &OsStr) -> bool {
    let hash = name.to_str().and_then(|name| name.strip_suffix(SUFFIX));
    hash.is_some_and(|hash| hash.len() == 16 && hash.bytes().all(|digit| digit.is_ascii_hexdigit()))
}

/// Whether a temporary file was to become a block.
fn is_temporary_block(name: &OsStr) -> bool {
    is_temporary(name) && name.to_str().is_some_and(|name| name.contains(&format!("{SUFFIX}.")))
}
