//! Small data sets that the programs make themselves, once, in the user's cache.
use candle_ddp::{Context, ProcessGroup, Result};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Returns the cache's folder of the data set `name` in this version: what other versions of a program have made is left as
/// it is. If the folder is missing, one rank of each host has `write` fill it; the other ranks wait. Every rank calls this.
pub(crate) fn folder(
    pg: &ProcessGroup,
    name: &str,
    version: u32,
    write: impl FnOnce(&Path) -> std::io::Result<()>,
) -> Result<PathBuf> {
    let folder = location().join("candle-ddp").join(format!("{name}-v{version}"));
    if pg.local_rank() == 0 {
        make(&folder, write).with_context(|| format!("writing a small data set to {}", folder.display()))?;
    }
    pg.barrier()?;
    Ok(folder)
}

/// Fills a new folder and renames it when it is complete, unless it is there already. Several processes may do so at once:
/// whoever is first wins.
fn make(folder: &Path, write: impl FnOnce(&Path) -> std::io::Result<()>) -> std::io::Result<()> {
    if folder.exists() {
        return Ok(());
    }
    let unfinished = unfinished(folder)?;
    let made = write(&unfinished).and_then(|()| fs::rename(&unfinished, folder));
    if made.is_err() {
        fs::remove_dir_all(&unfinished)?;
    }
    // A folder with files in it cannot be replaced by renaming.
    if folder.exists() { Ok(()) } else { made }
}

/// Makes a folder next to `folder` that no other process has.
fn unfinished(folder: &Path) -> std::io::Result<PathBuf> {
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    if let Some(parent) = folder.parent() {
        fs::create_dir_all(parent)?;
    }
    let mut number = 0;
    loop {
        let unfinished = folder.with_file_name(format!(".{name}-{}-{number}", std::process::id()));
        match fs::create_dir(&unfinished) {
            // A process of this number on another host, or one that was killed.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => number += 1,
            made => return made.map(|()| unfinished),
        }
    }
}

fn location() -> PathBuf {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let home = || absolute("HOME").map(|home| home.join(".cache"));
    absolute("XDG_CACHE_HOME").or_else(home).unwrap_or_else(std::env::temp_dir)
}
