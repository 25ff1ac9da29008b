//! Bytes of shards.
use crate::data::ReadRange;
use crate::{Error, Result};
use std::fmt::Display;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The size and the time of modification of a file, by which a change shows. Zeros for shards elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Stamp {
    pub(super) size: u64,
    /// In nanoseconds.
    pub(super) modified: i64,
}

impl Stamp {
    fn of(file: &File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        let modified = metadata.mtime().saturating_mul(1_000_000_000).saturating_add(metadata.mtime_nsec());
        Ok(Self { size: metadata.len(), modified })
    }

    /// Why a shard that has the stamp `now` is not the one that was opened, or indexed.
    pub(super) fn changed(self, now: Self) -> Option<String> {
        let reason = if self.size != now.size {
            format!("it had {} bytes and has {} now", self.size, now.size)
        } else if self.modified != now.modified {
            "it was written to".to_string()
        } else {
            return None;
        };
        Some(format!("it has changed since its index was made: {reason}"))
    }
}

/// A tar file, here or elsewhere.
pub(super) struct Shard {
    path: PathBuf,
    name: String,
    remote: Option<Arc<dyn ReadRange>>,
    /// When the shards were opened.
    pub(super) stamp: Stamp,
}

impl Shard {
    pub(super) fn new(path: PathBuf, remote: Option<Arc<dyn ReadRange>>) -> Result<Self> {
        let name = path.display().to_string();
        let mut shard = Self { path, name, remote, stamp: Stamp::default() };
        if shard.remote.is_none() {
            let stamp = File::open(&shard.path).and_then(|file| Stamp::of(&file));
            shard.stamp = stamp.map_err(|error| shard.error(error.to_string()))?;
        }
        Ok(shard)
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

    pub(super) fn error(&self, reason: String) -> Error {
        Error::DataFile { path: self.path.clone(), reason }
    }

    pub(super) fn error_at(&self, offset: u64, reason: impl Display) -> Error {
        self.error(format!("at byte {offset}: {reason}"))
    }

    /// Reads exactly these bytes.
    pub(super) fn read(&self, offset: u64, len: usize) -> Result<Vec<u8>> {
        let range = offset..offset.saturating_add(len as u64);
        let failed = |error: io::Error| self.error_at(offset, format!("reading {len} bytes: {error}"));
        let bytes = match &self.remote {
            Some(remote) => remote.read_range(&self.name, range).map_err(failed)?,
            None => {
                let file = File::open(&self.path).map_err(failed)?;
                if let Some(changed) = self.stamp.changed(Stamp::of(&file).map_err(failed)?) {
                    return Err(self.error(changed));
                }
                let mut bytes = vec![0; len];
                file.read_exact_at(&mut bytes, offset).map_err(failed)?;
                bytes
            }
        };
        if bytes.len() != len {
            let reason =
                format!("it should have {len} bytes more, and has {}: it is truncated or has changed", bytes.len());
            return Err(self.error_at(offset, reason));
        }
        Ok(bytes)
    }

    /// A reader from the beginning to the end.
    pub(super) fn reader(&self) -> io::Result<Box<dyn ReadSeek + '_>> {
        Ok(match &self.remote {
            Some(remote) => {
                Box::new(Ranges { remote: &**remote, name: &self.name, at: 0, buffer: Vec::new(), begin: 0 })
            }
            None => Box::new(File::open(&self.path)?),
        })
    }
}

pub(super) trait ReadSeek: Read + Seek {}
impl<R: Read + Seek> ReadSeek for R {}

/// Reads a file elsewhere in large pieces.
struct Ranges<'a> {
    remote: &'a dyn ReadRange,
    name: &'a str,
    at: u64,
    /// The piece that was read last, and where it begins.
    buffer: Vec<u8>,
    begin: u64,
}

impl Read for Ranges<'_> {
    fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        const PIECE: u64 = 1 << 20;
        let Range { start, end } = self.begin..self.begin + self.buffer.len() as u64;
        if !(start..end).contains(&self.at) {
            self.buffer = self.remote.read_range(self.name, self.at..self.at.saturating_add(PIECE))?;
            self.begin = self.at;
        }
        let rest = &self.buffer[(self.at - self.begin) as usize..];
        let len = rest.len().min(target.len());
        target[..len].copy_from_slice(&rest[..len]);
        self.at += len as u64;
        Ok(len)
    }
}

impl Seek for Ranges<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let at = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
            SeekFrom::End(_) => return Err(io::ErrorKind::Unsupported.into()),
        };
        self.at = at.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.at)
    }
}
