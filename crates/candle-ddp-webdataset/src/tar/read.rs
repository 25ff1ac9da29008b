//! Bytes of shards.
use super::entries::{Fault, ReadAt};
use crate::read_range::{location_of, version_of};
use crate::{Error, ReadRange, Result};
use candle_ddp_base::hash::content_64;
use std::fmt::Display;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// A shard that has changed has another stamp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stamp {
    pub(super) size: u64,
    /// The time of modification in nanoseconds; for shards elsewhere, a hash of their version's tag.
    pub(super) version: u64,
}

impl Stamp {
    fn of(file: &File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        let modified = metadata.mtime().saturating_mul(1_000_000_000).saturating_add(metadata.mtime_nsec());
        Ok(Self { size: metadata.len(), version: modified.cast_unsigned() })
    }

    /// The reason why a shard with the stamp `now` is not the shard with this stamp.
    fn changed(self, now: Self) -> Option<String> {
        let reason = if self.size != now.size {
            format!("it had {} bytes and has {} now", self.size, now.size)
        } else if self.version != now.version {
            "it was written to".to_string()
        } else {
            return None;
        };
        Some(reason)
    }
}

/// The shard that an index describes.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Indexed {
    /// When the index was made.
    pub(super) stamp: Stamp,
    /// The path of the index.
    pub(super) file: PathBuf,
}

/// A tar file, here or elsewhere.
pub(super) struct Shard {
    path: PathBuf,
    name: String,
    remote: Option<Arc<dyn ReadRange>>,
    /// Whether the version elsewhere was compared with the index.
    compared: OnceLock<()>,
}

impl Shard {
    pub(super) fn new(path: PathBuf, remote: Option<Arc<dyn ReadRange>>) -> Self {
        let name = path.display().to_string();
        Self { path, name, remote, compared: OnceLock::new() }
    }

    pub(super) fn is_remote(&self) -> bool {
        self.remote.is_some()
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Where it lies elsewhere.
    pub(super) fn location(&self) -> Result<Option<String>> {
        let location = self.remote.as_ref().map(|remote| location_of(remote, &self.name)).transpose();
        location.map_err(|error| self.error(error.to_string()))
    }

    /// Its stamp now.
    pub(super) fn stamp(&self) -> Result<Stamp> {
        let stamp = match &self.remote {
            None => File::open(&self.path).and_then(|file| Stamp::of(&file)),
            Some(remote) => version_of(remote, &self.name)
                .map(|version| Stamp { size: version.len, version: content_64(version.tag.as_bytes()) }),
        };
        stamp.map_err(|error| self.error(error.to_string()))
    }

    pub(super) fn error(&self, reason: String) -> Error {
        Error::data_file(&self.path, reason)
    }

    pub(super) fn error_at(&self, offset: u64, reason: impl Display) -> Error {
        self.error(format!("at byte {offset}: {reason}"))
    }

    /// Reads exactly these bytes of the shard, if it is the indexed one.
    pub(super) fn read(&self, offset: u64, len: usize, indexed: &Indexed) -> Result<Vec<u8>> {
        let failed = |error: io::Error| self.error_at(offset, format!("reading {len} bytes: {error}"));
        let Some(remote) = &self.remote else {
            let file = File::open(&self.path).map_err(failed)?;
            self.compare(indexed, Stamp::of(&file).map_err(failed)?)?;
            let mut bytes = vec![0; len];
            file.read_exact_at(&mut bytes, offset).map_err(failed)?;
            return Ok(bytes);
        };
        // Only once, since it is a question to the other side.
        if self.compared.get().is_none() {
            self.compare(indexed, self.stamp()?)?;
            let _ = self.compared.set(());
        }
        exactly(remote.read_range(&self.name, offset..offset + len as u64), len).map_err(failed)
    }

    /// The same bytes again, past the caches of a shard elsewhere. None if there are no caches.
    pub(super) fn read_again(&self, offset: u64, len: usize) -> Option<Result<Vec<u8>>> {
        let failed = |error: io::Error| self.error_at(offset, format!("reading {len} bytes again: {error}"));
        let remote = self.remote.as_ref()?;
        Some(exactly(remote.read_again(&self.name, offset..offset + len as u64), len).map_err(failed))
    }

    /// An error if the shard is not the indexed one.
    pub(super) fn compare(&self, indexed: &Indexed, now: Stamp) -> Result<()> {
        let Some(reason) = indexed.stamp.changed(now) else { return Ok(()) };
        let hint = format!("If that is right, remove {}, and a new one is made", indexed.file.display());
        Err(self.error(format!("it has changed since its index was made: {reason}. {hint}")))
    }

    /// Reads headers, past all caches if `again` says so.
    pub(super) fn headers(&self, len: u64, again: bool) -> io::Result<Box<dyn ReadAt + '_>> {
        Ok(match &self.remote {
            Some(remote) => {
                Box::new(Pieces { remote: &**remote, name: &self.name, len, again, begin: 0, piece: Vec::new() })
            }
            None => Box::new(File::open(&self.path)?),
        })
    }

    /// A fault of its content, or of reading it.
    pub(super) fn fault(&self, begin: u64, fault: Fault) -> Error {
        match fault {
            Fault::Read(at, error) => self.error_at(begin + at, error),
            Fault::Content(at, reason) => self.error_at(begin + at, reason),
        }
    }
}

fn exactly(bytes: io::Result<Vec<u8>>, len: usize) -> io::Result<Vec<u8>> {
    let bytes = bytes?;
    match bytes.len() == len {
        true => Ok(bytes),
        false => Err(io::Error::other(format!("the source gave {} bytes", bytes.len()))),
    }
}

impl ReadAt for File {
    fn fill(&mut self, offset: u64, target: &mut [u8]) -> io::Result<()> {
        self.read_exact_at(target, offset)
    }
}

/// Reads a file elsewhere in large pieces.
struct Pieces<'a> {
    remote: &'a dyn ReadRange,
    name: &'a str,
    len: u64,
    again: bool,
    /// The piece that was read last, and where it begins.
    begin: u64,
    piece: Vec<u8>,
}

impl ReadAt for Pieces<'_> {
    fn fill(&mut self, offset: u64, target: &mut [u8]) -> io::Result<()> {
        const PIECE: u64 = 1 << 20;
        let mut done = 0;
        while done < target.len() {
            let at = offset + done as u64;
            if !(self.begin..self.begin + self.piece.len() as u64).contains(&at) {
                let range = at..at.saturating_add(PIECE).min(self.len);
                let len = (range.end - range.start) as usize;
                let read = match self.again {
                    true => self.remote.read_again(self.name, range),
                    false => self.remote.read_range(self.name, range),
                };
                (self.begin, self.piece) = (at, exactly(read, len)?);
            }
            let rest = &self.piece[(at - self.begin) as usize..];
            let len = rest.len().min(target.len() - done);
            target[done..done + len].copy_from_slice(&rest[..len]);
            done += len;
        }
        Ok(())
    }
}
