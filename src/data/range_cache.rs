//! Blocks of files that lie elsewhere, kept on the local disk.
use super::ReadRange;
use crate::hash::content_64;
use crate::panic::lock;
use crate::state::file::{PreparedFile, Progress};
use crate::{Error, Result};
use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

/// How much a [`RangeCache`] keeps, and how often it tries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RangeCacheOptions {
    /// The most bytes that it keeps. When there are more, those that were read first are removed. Default: 16 GiB.
    pub max_bytes: u64,
    /// How many bytes are read at a time. Caches that share a folder must have the same number. Default: 4 MiB.
    pub block_bytes: u64,
    /// How often a read that fails is tried again. Default: 5.
    pub retries: u32,
    /// How long to wait before the first retry; each next one waits twice as long, but at most 30 s. Default: 0.2 s.
    pub pause: Duration,
}

impl Default for RangeCacheOptions {
    fn default() -> Self {
        Self { max_bytes: 16 << 30, block_bytes: 4 << 20, retries: 5, pause: Duration::from_millis(200) }
    }
}

/// Reads files that lie elsewhere in blocks, and keeps these in a folder. Several caches, such as those of the ranks on one host,
/// may share the folder; it then has what they read together, up to the limit of each. Reads that fail are tried again.
///
/// What is kept stays when the program ends, and is found again under the file's name. So files must not change under their
/// names: remove the folder if they have.
pub struct RangeCache<R> {
    source: R,
    folder: PathBuf,
    options: RangeCacheOptions,
    /// Blocks that threads are reading, so that each is read once.
    reading: Mutex<HashMap<PathBuf, Arc<Mutex<()>>>>,
}

impl<R: ReadRange> RangeCache<R> {
    /// A cache of what `source` reads, in `folder`, which is created if it does not exist.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `block_bytes` is 0 or above `max_bytes`; [`Error::Io`] if the folder cannot be created.
    pub fn new(source: R, folder: impl Into<PathBuf>, options: RangeCacheOptions) -> Result<Self> {
        let (folder, RangeCacheOptions { max_bytes, block_bytes, .. }) = (folder.into(), options);
        if block_bytes == 0 || block_bytes > max_bytes {
            let reason = format!("it must be from 1 to max_bytes = {max_bytes}, not {block_bytes}");
            return Err(Error::invalid("block_bytes", reason));
        }
        let context = |error| Error::io(format!("creating the folder of a cache, {}", folder.display()), error);
        std::fs::create_dir_all(&folder).map_err(context)?;
        Ok(Self { source, folder, options, reading: Mutex::default() })
    }

    /// The part `range` of a block, and fewer bytes where the file ends.
    fn of_block(&self, file: &str, block: u64, range: Range<u64>) -> io::Result<Vec<u8>> {
        let path = self.folder.join(format!("{:016x}-{block}.block", content_64(file.as_bytes())));
        if let Some(bytes) = kept(&path, &range)? {
            return Ok(bytes);
        }
        let reading = lock(&self.reading).entry(path.clone()).or_default().clone();
        let alone = lock(&reading);
        // Another thread may have read it in the meantime.
        let bytes = match kept(&path, &range) {
            Ok(Some(bytes)) => Ok(bytes),
            Ok(None) => self.fetched(file, block).map(|bytes| {
                if let Err(error) = self.keep(&path, &bytes) {
                    log::warn!("a block of {file} cannot be kept in {}: {error}", self.folder.display());
                }
                part(&bytes, &range)
            }),
            Err(error) => Err(error),
        };
        drop(alone);
        lock(&self.reading).remove(&path);
        bytes
    }

    fn fetched(&self, file: &str, block: u64) -> io::Result<Vec<u8>> {
        let size = self.options.block_bytes;
        let range = block.saturating_mul(size)..block.saturating_add(1).saturating_mul(size);
        self.retried(file, &range, || {
            let bytes = self.source.read_range(file, range.clone())?;
            let end = range.start.saturating_add(bytes.len() as u64);
            // What is kept for long must be right.
            let complete = end == range.end || self.source.read_range(file, end..end.saturating_add(1))?.is_empty();
            match complete && end <= range.end {
                true => Ok(bytes),
                false => Err(io::Error::other(format!("the source gave {} bytes of them", bytes.len()))),
            }
        })
    }

    fn retried(&self, file: &str, range: &Range<u64>, read: impl Fn() -> io::Result<Vec<u8>>) -> io::Result<Vec<u8>> {
        let RangeCacheOptions { retries, mut pause, .. } = self.options;
        let mut attempt = 0;
        loop {
            attempt += 1;
            let error = match read() {
                Ok(bytes) => return Ok(bytes),
                Err(error) => error,
            };
            let kind = error.kind();
            let hopeless = matches!(
                kind,
                ErrorKind::NotFound | ErrorKind::PermissionDenied | ErrorKind::InvalidInput | ErrorKind::Unsupported
            );
            let text = format!("bytes {}..{} of {file}, attempt {attempt}: {error}", range.start, range.end);
            if hopeless || attempt > retries {
                return Err(io::Error::new(kind, text));
            }
            log::warn!("{text}; trying again");
            std::thread::sleep(pause);
            pause = pause.saturating_mul(2).min(Duration::from_secs(30));
        }
    }

    fn keep(&self, path: &Path, bytes: &[u8]) -> Result<()> {
        PreparedFile::write(path, &Progress::default(), |file| file.write_all(bytes)).and_then(PreparedFile::commit)?;
        let listing = |error| Error::io(format!("listing {}", self.folder.display()), error);
        let mut blocks: Vec<(SystemTime, u64, PathBuf)> = Vec::new();
        for entry in std::fs::read_dir(&self.folder).map_err(listing)? {
            let entry = entry.map_err(listing)?;
            let is_block = entry.path().extension().is_some_and(|extension| extension == "block");
            // Another rank may have removed it.
            if let (true, Ok(metadata)) = (is_block, entry.metadata()) {
                blocks.push((metadata.modified().map_err(listing)?, metadata.len(), entry.path()));
            }
        }
        let mut total: u64 = blocks.iter().map(|(_, len, _)| len).sum();
        blocks.sort_unstable();
        for (_, len, path) in blocks {
            if total <= self.options.max_bytes {
                break;
            }
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return Err(Error::io(format!("removing {}", path.display()), error));
                }
                _ => total -= len,
            }
        }
        Ok(())
    }
}

/// The part of a kept block, if it is kept.
fn kept(path: &Path, range: &Range<u64>) -> io::Result<Option<Vec<u8>>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let len = file.metadata()?.len();
    let mut bytes = vec![0; (range.end.min(len).saturating_sub(range.start)) as usize];
    file.read_exact_at(&mut bytes, range.start)?;
    Ok(Some(bytes))
}

fn part(bytes: &[u8], range: &Range<u64>) -> Vec<u8> {
    let place = |at: u64| (at.min(bytes.len() as u64)) as usize;
    bytes[place(range.start)..place(range.end)].to_vec()
}

impl<R: ReadRange> ReadRange for RangeCache<R> {
    fn read_range(&self, file: &str, range: Range<u64>) -> io::Result<Vec<u8>> {
        let size = self.options.block_bytes;
        let (mut bytes, mut at) = (Vec::new(), range.start);
        while at < range.end {
            let block = at / size;
            let begin = block * size;
            let end = (range.end - begin).min(size);
            let part = self.of_block(file, block, at - begin..end)?;
            let ended = (part.len() as u64) < end - (at - begin);
            bytes.extend(part);
            if ended {
                break;
            }
            at = begin + end;
        }
        Ok(bytes)
    }
}

impl<R> fmt::Debug for RangeCache<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RangeCache")
            .field("folder", &self.folder)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}
