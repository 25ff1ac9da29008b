//! Blocks of files that lie elsewhere, kept on the local disk.
mod block;
mod folder;

use crate::read_range::{location_of, version_of};
use crate::{Error, FileVersion, ReadRange, Result};
use block::{Block, KeptBlock, Miss};
use candle_ddp_base::debug_fields;
use candle_ddp_base::panic::lock;
use candle_ddp_base::warnings::Warnings;
use folder::Folder;
use std::collections::HashMap;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How much a [`RangeCache`] keeps, and how often it tries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RangeCacheOptions {
    /// The most bytes that it keeps. When there are more, the blocks that were read first are removed. Default: 16 GiB. Since
    /// caches that share a folder do not look at it after every block, each of them may exceed the limit by a 64th.
    pub max_bytes: u64,
    /// The number of bytes that are read at a time. Caches that share a folder should have the same number, since they do not find each
    /// other's blocks otherwise. Default: 4 MiB.
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

/// Reads files that lie elsewhere in blocks, and keeps the blocks in a folder. Several caches, such as the caches of the ranks on
/// one host, may share the folder; it then has the blocks that they read together, up to the limit of each. Reads that fail are
/// tried again.
///
/// The blocks stay when the program ends. A block belongs to one version of one file, by its [`location`](ReadRange::location), its
/// length and its [`tag`](FileVersion::tag): files of other sources and files that have changed are read from their source. A cache
/// asks for a file's version before it first reads it, and after every block that it has read from the source; a file that has
/// changed since is an error, so that no run sees both versions.
///
/// Blocks have hashes, which every read compares: a block that is damaged, cut off or exchanged for another is read again from the
/// source. The hashes find accidents. They do not protect against people who may write to the folder.
pub struct RangeCache<R> {
    source: R,
    folder: Folder,
    options: RangeCacheOptions,
    /// The files that were read so far, by their names.
    files: Mutex<HashMap<String, Arc<SourceFile>>>,
    /// The hashes of blocks, by the numbers of their files and their own.
    hashes: Mutex<HashMap<(usize, u64), Arc<KeptBlock>>>,
    /// Blocks that threads are reading, so that each is read once.
    reading: Mutex<HashMap<PathBuf, Arc<Mutex<()>>>>,
    warnings: Mutex<Warnings>,
}

/// A file of the source, as it was when it was first read.
struct SourceFile {
    /// Its number among the files that were read.
    number: usize,
    name: String,
    location: String,
    version: FileVersion,
}

impl<R: ReadRange> RangeCache<R> {
    /// A cache of what `source` reads, in `folder`, which is created if it does not exist. Nothing else may be in the folder,
    /// except the indices of [`TarShards`](super::TarShards).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `block_bytes` is 0 or above `max_bytes`, or there are other files in the folder; [`Error::Io`]
    /// if the folder cannot be created or listed.
    pub fn new(source: R, folder: impl Into<PathBuf>, options: RangeCacheOptions) -> Result<Self> {
        let RangeCacheOptions { max_bytes, block_bytes, .. } = options;
        if block_bytes == 0 || block_bytes > max_bytes {
            let reason = format!("it must be from 1 to max_bytes = {max_bytes}, not {block_bytes}");
            return Err(Error::invalid("block_bytes", reason));
        }
        Ok(Self {
            source,
            folder: Folder::open(folder.into(), max_bytes)?,
            options,
            files: Mutex::default(),
            hashes: Mutex::default(),
            reading: Mutex::default(),
            warnings: Mutex::new(Warnings::new("the cache of shards")),
        })
    }

    fn file(&self, name: &str) -> io::Result<Arc<SourceFile>> {
        if let Some(file) = lock(&self.files).get(name) {
            return Ok(file.clone());
        }
        let location = location_of(&self.source, name)?;
        let version = self.retried(&format!("the version of {name}"), || version_of(&self.source, name))?;
        let mut files = lock(&self.files);
        let number = files.len();
        let file = || Arc::new(SourceFile { number, name: name.to_string(), location, version });
        Ok(files.entry(name.to_string()).or_insert_with(file).clone())
    }

    /// Reads a range, from the source itself if `again` is true.
    fn read(&self, name: &str, range: Range<u64>, again: bool) -> io::Result<Vec<u8>> {
        let (file, size) = (self.file(name)?, self.options.block_bytes);
        let (mut bytes, mut at, end) = (Vec::new(), range.start, range.end.min(file.version.len));
        while at < end {
            let number = at / size;
            let begin = number * size;
            let block_end = begin.saturating_add(size).min(end);
            self.read_block(&file, number, (at - begin) as usize..(block_end - begin) as usize, again, &mut bytes)?;
            at = block_end;
        }
        Ok(bytes)
    }

    /// Adds a part of a block to `bytes`.
    fn read_block(
        &self,
        file: &SourceFile,
        number: u64,
        part: Range<usize>,
        again: bool,
        bytes: &mut Vec<u8>,
    ) -> io::Result<()> {
        if !again && self.read_kept(file, number, part.clone(), bytes) {
            return Ok(());
        }
        let block = self.block(file, number);
        let reading = lock(&self.reading).entry(block.path().to_path_buf()).or_default().clone();
        let alone = lock(&reading);
        // Another thread may have read it in the meantime.
        let result = match !again && self.read_kept(file, number, part.clone(), bytes) {
            true => Ok(()),
            false => self.fetched(file, number).map(|fetched| {
                self.keep(file, number, &block, &fetched);
                bytes.extend_from_slice(&fetched[part]);
            }),
        };
        drop(alone);
        lock(&self.reading).remove(block.path());
        result
    }

    fn block(&self, file: &SourceFile, number: u64) -> Block {
        Block::new(self.folder.path(), &file.location, &file.version, self.options.block_bytes, number)
    }

    /// Adds a part of a block to `bytes`, if it is kept and intact.
    fn read_kept(&self, file: &SourceFile, number: u64, part: Range<usize>, bytes: &mut Vec<u8>) -> bool {
        let known = lock(&self.hashes).get(&(file.number, number)).cloned();
        let kept = known.map_or_else(|| self.open(file, number), Ok);
        let Err(miss) = kept.and_then(|kept| kept.read(part, bytes)) else { return true };
        lock(&self.hashes).remove(&(file.number, number));
        if let Miss::Bad(reason) = miss {
            let (name, path) = (&file.name, self.block(file, number).path().display().to_string());
            lock(&self.warnings)
                .warn(format_args!("{path} {reason}: this part of {name} is read again from its source"));
        }
        false
    }

    fn open(&self, file: &SourceFile, number: u64) -> Result<Arc<KeptBlock>, Miss> {
        let kept = Arc::new(self.block(file, number).open()?);
        self.remember(file, number, kept.clone());
        Ok(kept)
    }

    fn remember(&self, file: &SourceFile, number: u64, kept: Arc<KeptBlock>) {
        /// 16 MiB of hashes with blocks of the default size.
        const MOST: usize = 4096;
        let mut hashes = lock(&self.hashes);
        if hashes.len() >= MOST {
            hashes.clear();
        }
        hashes.insert((file.number, number), kept);
    }

    fn keep(&self, file: &SourceFile, number: u64, block: &Block, bytes: &[u8]) {
        let kept = block.write(bytes).and_then(|(kept, written)| {
            self.remember(file, number, Arc::new(kept));
            self.folder.wrote(written)
        });
        if let Err(error) = kept {
            let (name, folder) = (&file.name, self.folder.path().display());
            lock(&self.warnings).warn(format_args!("a block of {name} cannot be kept in {folder}: {error}"));
        }
    }

    /// A block of the source.
    fn fetched(&self, file: &SourceFile, number: u64) -> io::Result<Vec<u8>> {
        let SourceFile { name, version, .. } = file;
        let size = self.options.block_bytes;
        let begin = number * size;
        let range = begin..begin.saturating_add(size).min(version.len);
        let what = format!("bytes {}..{} of {name}", range.start, range.end);
        let bytes = self.retried(&what, || {
            let bytes = self.source.read_again(name, range.clone())?;
            match bytes.len() as u64 == range.end - range.start {
                true => Ok(bytes),
                false => Err(io::Error::other(format!("the source gave {} bytes", bytes.len()))),
            }
        })?;
        // The bytes belong to the version if it was there before and after.
        let now = self.retried(&format!("the version of {name}"), || version_of(&self.source, name))?;
        match now == *version {
            true => Ok(bytes),
            false => Err(io::Error::other(format!(
                "{name} has changed: it had {} bytes ({}) when it was first read, and has {} bytes ({}) now. Begin the run again",
                version.len, version.tag, now.len, now.tag
            ))),
        }
    }

    fn retried<T>(&self, what: &str, read: impl Fn() -> io::Result<T>) -> io::Result<T> {
        let RangeCacheOptions { retries, mut pause, .. } = self.options;
        let mut attempt = 0;
        loop {
            attempt += 1;
            let error = match read() {
                Ok(value) => return Ok(value),
                Err(error) => error,
            };
            let kind = error.kind();
            let hopeless = matches!(
                kind,
                ErrorKind::NotFound | ErrorKind::PermissionDenied | ErrorKind::InvalidInput | ErrorKind::Unsupported
            );
            let text = format!("{what}, attempt {attempt}: {error}");
            if hopeless || attempt > retries {
                return Err(io::Error::new(kind, text));
            }
            log::warn!("{text}; trying again");
            std::thread::sleep(pause);
            pause = pause.saturating_mul(2).min(Duration::from_secs(30));
        }
    }
}

impl<R: ReadRange> ReadRange for RangeCache<R> {
    fn location(&self, file: &str) -> String {
        self.source.location(file)
    }

    /// The version that was there when this cache first read the file.
    fn version(&self, file: &str) -> io::Result<FileVersion> {
        self.file(file).map(|file| file.version.clone())
    }

    fn read_range(&self, file: &str, range: Range<u64>) -> io::Result<Vec<u8>> {
        self.read(file, range, false)
    }

    fn read_again(&self, file: &str, range: Range<u64>) -> io::Result<Vec<u8>> {
        self.read(file, range, true)
    }
}

debug_fields!(<R> RangeCache<R>: |this| folder = this.folder.path(), options = this.options);
