//! The folders of checkpoints: `step-00001000`, or `step-00001000-2` if that name was taken.
//!
//! While a save is running, its folder holds a temporary file for the index, which stays locked as long as the
//! process lives. A folder without an index whose temporary file is not locked is a leftover of a killed process. A
//! folder with neither file is not ours.
use super::index::{Fault, INDEX, Index};
use crate::error::Context;
use crate::host::host_name;
use crate::state::file::{PreparedFile, Progress, is_temporary, is_temporary_for, lock_leftover, temporary_name};
use crate::{Error, Result};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The name of a checkpoint's folder. A later attempt at the same step is newer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Name {
    pub(super) step: u64,
    attempt: u32,
}

impl Name {
    fn parse(name: &OsStr) -> Option<Self> {
        let number = name.to_str()?.strip_prefix("step-")?;
        let (step, attempt) = match number.split_once('-') {
            Some((step, attempt)) => (step, attempt.parse().ok()?),
            None => (number, 1),
        };
        let parsed = Self { step: step.parse().ok()?, attempt };
        // Other programs may have folders named `step-7`.
        (name == parsed.text().as_str()).then_some(parsed)
    }

    fn text(self) -> String {
        let Self { step, attempt } = self;
        if attempt == 1 { format!("step-{step:08}") } else { format!("step-{step:08}-{attempt}") }
    }
}

/// A checkpoint that has an index.
#[derive(Clone, Debug)]
pub(super) struct Checkpoint {
    pub(super) name: Name,
    pub(super) path: PathBuf,
    pub(super) index: Index,
}

/// The folders in `root` that are named like checkpoints, oldest first. None if `root` does not exist.
fn named(root: &Path) -> Result<Vec<(Name, PathBuf)>> {
    let io = |error| Error::io(format!("reading {}", root.display()), error);
    let entries = match root.read_dir() {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(io(error)),
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(io)?;
        if let Some(name) = Name::parse(&entry.file_name())
            && entry.file_type().map_err(io)?.is_dir()
        {
            found.push((name, entry.path()));
        }
    }
    found.sort_by_key(|(name, _)| *name);
    Ok(found)
}

/// A folder that has an index but is not a checkpoint that can be loaded.
#[derive(Clone, Debug)]
pub(super) struct Faulty {
    pub(super) name: Name,
    pub(super) path: PathBuf,
    pub(super) fault: Fault,
}

/// The contents of a folder of checkpoints, each list oldest first.
#[derive(Clone, Debug, Default)]
pub(super) struct Listing {
    /// The complete checkpoints.
    pub(super) whole: Vec<Checkpoint>,
    /// The checkpoints that are damaged, as far as their indexes show, or have an unknown format.
    pub(super) faulty: Vec<Faulty>,
}

impl Listing {
    /// The checkpoints in `root`.
    pub(super) fn of(root: &Path) -> Result<Self> {
        let mut listing = Self::default();
        for (name, path) in named(root)? {
            match Index::read(&path, name.step)? {
                Ok(index) => listing.whole.push(Checkpoint { name, path, index }),
                Err(Fault::Absent) => {}
                Err(fault) => listing.faulty.push(Faulty { name, path, fault }),
            }
        }
        Ok(listing)
    }

    /// The newest checkpoint of a format that only later versions know.
    pub(super) fn newest_unknown(&self, is_counted: impl Fn(Name) -> bool) -> Option<&Faulty> {
        let is_unknown = |faulty: &&Faulty| matches!(faulty.fault, Fault::Unknown(_)) && is_counted(faulty.name);
        self.faulty.iter().rfind(is_unknown)
    }
}

/// The folder of a checkpoint that is being saved. It is removed if this is dropped before the checkpoint is
/// complete.
#[derive(Debug)]
pub(super) struct Started {
    pub(super) path: PathBuf,
    index: Option<PreparedFile>,
}

impl Started {
    /// Makes a new folder in `root`, and `root` itself if it has been removed.
    pub(super) fn new(root: &Path, step: u64) -> Result<Self> {
        make(root)?;
        let mut name = Name { step, attempt: 1 };
        let path = loop {
            let path = root.join(name.text());
            match fs::create_dir(&path) {
                Ok(()) => break path,
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists && name.attempt < u32::MAX => {
                    name.attempt += 1;
                }
                Err(error) => return Err(Error::io(format!("making the folder {}", path.display()), error)),
            }
        };
        let mut started = Self { path, index: None };
        started.index = Some(PreparedFile::create(&started.path.join(INDEX))?);
        sync(root)?;
        Ok(started)
    }

    /// Writes the index, which completes the checkpoint.
    pub(super) fn finish(mut self, index: &Index, progress: &Progress) -> Result<PathBuf> {
        let text = index.to_json()?;
        if let Some(file) = &self.index {
            file.fill(progress, |file| file.write_all(&text))?;
        }
        if let Some(file) = self.index.take() {
            file.commit()?;
        }
        Ok(std::mem::take(&mut self.path))
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if !self.path.as_os_str().is_empty() {
            // The index may have its name already, and yet not be on the disk.
            let _ = fs::remove_file(self.path.join(INDEX));
            remove_files(&self.path, |_| true);
            self.index = None;
            remove_folder(&self.path);
        }
    }
}

/// Removes what killed saves have left in `root`. Whatever cannot be removed stays.
pub(super) fn clean(root: &Path) {
    let folders = named(root).unwrap_or_else(|error| {
        log::debug!("{error}");
        Vec::new()
    });
    for (_, path) in folders.into_iter().filter(|(_, path)| !path.join(INDEX).exists()) {
        let Ok(entries) = path.read_dir() else { continue };
        let names: Vec<_> = entries.flatten().map(|entry| entry.file_name()).collect();
        let temporary: Vec<_> = names.iter().filter(|name| is_temporary(name)).collect();
        // If it holds the temporary file of an index, all of its files belong to a save; otherwise only the temporary
        // ones do.
        let is_ours = temporary.iter().any(|name| is_temporary_for(name, OsStr::new(INDEX)));
        let locks: Option<Vec<File>> = temporary.iter().map(|name| lock_leftover(&path.join(name))).collect();
        if locks.is_none() || (!is_ours && temporary.len() < names.len()) {
            continue;
        }
        remove_files(&path, |_| true);
        remove_temporary_index(&path);
        if remove_folder(&path) {
            log::info!("removed {}, which a killed save had left behind", path.display());
        }
    }
}

/// Removes a complete checkpoint. Its index goes first, so that half of one never counts.
pub(super) fn remove(checkpoint: &Checkpoint) -> Result<()> {
    let path = &checkpoint.path;
    let unpublish = || {
        fs::rename(path.join(INDEX), path.join(temporary_name(OsStr::new(INDEX))?))?;
        File::open(path)?.sync_all()
    };
    unpublish().with_context(|| format!("removing {}", path.display()))?;
    let files: Vec<_> = checkpoint.index.parts.iter().flat_map(|part| &part.files).collect();
    remove_files(path, |name| files.iter().any(|file| name == file.name.as_str()));
    remove_temporary_index(path);
    remove_folder(path);
    Ok(())
}

/// Removes the files of parts that `is_removed` selects, and all temporary files except the index's, which marks the
/// folder as ours.
fn remove_files(folder: &Path, is_removed: impl Fn(&OsStr) -> bool) {
    remove_if(folder, |name| match is_temporary(name) {
        true => !is_temporary_for(name, OsStr::new(INDEX)),
        false => Path::new(name).extension() == Some(OsStr::new("safetensors")) && is_removed(name),
    });
}

fn remove_temporary_index(folder: &Path) {
    remove_if(folder, |name| is_temporary_for(name, OsStr::new(INDEX)));
}

fn remove_if(folder: &Path, is_removed: impl Fn(&OsStr) -> bool) {
    let Ok(entries) = folder.read_dir() else { return };
    for entry in entries.flatten().filter(|entry| is_removed(&entry.file_name())) {
        if let Err(error) = fs::remove_file(entry.path()) {
            log::debug!("{} cannot be removed: {error}", entry.path().display());
        }
    }
}

/// Removes a folder unless it contains other files.
fn remove_folder(folder: &Path) -> bool {
    let removed = fs::remove_dir(folder);
    if let Err(error) = &removed {
        log::debug!("{} cannot be removed: {error}", folder.display());
    }
    removed.is_ok()
}

/// A file in the folder, which goes with this. Other ranks [look for it](find), since on another host the path may lead to another disk.
pub(super) struct Mark {
    path: PathBuf,
    pub(super) name: String,
    /// Otherwise it would be a leftover.
    _lock: Option<File>,
}

impl Mark {
    pub(super) fn new(root: &Path) -> Result<Self> {
        let making = || format!("making a file in {}", root.display());
        let name = temporary_name(OsStr::new(PROBE)).with_context(making)?;
        let path = root.join(&name);
        File::create_new(&path).with_context(making)?;
        Ok(Self { _lock: lock_leftover(&path), path, name })
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.path) {
            log::debug!("{} cannot be removed: {error}", self.path.display());
        }
    }
}

/// The name of files that are made to see whether that is possible.
const PROBE: &str = "probe";

/// Checks that `root` is the folder in which rank 0 has made the file `mark`.
pub(super) fn find(root: &Path, mark: &str) -> Result<()> {
    /// A file may take a moment to appear on another host.
    const PATIENCE: Duration = Duration::from_secs(3);
    let since = Instant::now();
    let here = root.metadata().with_context(|| {
        format!(
            "looking for the folder {}, which exists on rank 0 (all ranks need the same file system)",
            root.display()
        )
    })?;
    if !here.is_dir() {
        return Err(Error::io(format!("using {}", root.display()), io::Error::from(io::ErrorKind::NotADirectory)));
    }
    let path = root.join(mark);
    while !path.try_exists().with_context(|| format!("looking for {}", path.display()))? {
        if since.elapsed() >= PATIENCE {
            let (root, host) = (root.display(), host_name());
            let reason = format!(
                "{root} on the host {host} is another folder than rank 0's, which has just made a file there that is missing here. All \
                 ranks need the same file system: give a folder that all hosts share, or mount it on {host}"
            );
            return Err(Error::invalid("folder", reason));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Checks that this rank can make files in `root`, and leaves none there.
pub(super) fn probe(root: &Path) -> Result<()> {
    Ok(PreparedFile::create(&root.join(PROBE)).map(drop)?)
}

/// Makes a folder and its missing parents, and waits until all of them are on the disk.
pub(super) fn make(folder: &Path) -> Result<()> {
    let missing: Vec<_> =
        folder.ancestors().take_while(|folder| !folder.as_os_str().is_empty() && !folder.exists()).collect();
    fs::create_dir_all(folder).with_context(|| format!("making the folder {}", folder.display()))?;
    missing.into_iter().filter_map(Path::parent).try_for_each(|parent| match parent.as_os_str().is_empty() {
        true => sync(Path::new(".")),
        false => sync(parent),
    })
}

fn sync(folder: &Path) -> Result<()> {
    File::open(folder).and_then(|folder| folder.sync_all()).with_context(|| format!("writing {}", folder.display()))
}

#[cfg(test)]
mod tests;
