//! The files of a `RangeCache`: whose they are, which version they hold, and what happens when they are damaged.
use candle_ddp_testing::tar_files::{files, shard};
use candle_ddp_testing::{Random, assert_error};
use candle_ddp_webdataset::{Error, FileVersion, RangeCache, RangeCacheOptions, ReadRange, Result, TarShards};
use std::fs;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tempfile::tempdir;

const BLOCK: u64 = 20_000;

fn options() -> RangeCacheOptions {
    RangeCacheOptions { max_bytes: 64 * BLOCK, block_bytes: BLOCK, retries: 1, pause: Duration::ZERO }
}

/// A source of one file.
struct Source {
    location: String,
    content: Mutex<Vec<u8>>,
    tag: Mutex<String>,
    reads: AtomicUsize,
    /// How many answers are wrong from now on: the last block of 512 bytes is zeros.
    lies: AtomicUsize,
}

fn source(location: &str, content: Vec<u8>) -> Arc<Source> {
    let (content, tag) = (Mutex::new(content), Mutex::new("1".to_string()));
    Arc::new(Source {
        location: location.to_string(),
        content,
        tag,
        reads: AtomicUsize::new(0),
        lies: AtomicUsize::new(0),
    })
}

impl Source {
    fn change(&self, tag: &str, content: Vec<u8>) {
        (*self.tag.lock().unwrap(), *self.content.lock().unwrap()) = (tag.to_string(), content);
    }

    /// The number of reads since it was asked for.
    fn reads(&self) -> usize {
        self.reads.swap(0, Ordering::SeqCst)
    }
}

impl ReadRange for Source {
    fn location(&self, file: &str) -> String {
        if self.location.is_empty() { String::new() } else { format!("{}/{file}", self.location) }
    }

    fn version(&self, _: &str) -> io::Result<FileVersion> {
        Ok(FileVersion { len: self.content.lock().unwrap().len() as u64, tag: self.tag.lock().unwrap().clone() })
    }

    fn read_range(&self, _: &str, range: Range<u64>) -> io::Result<Vec<u8>> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        let content = self.content.lock().unwrap();
        let mut bytes = content.get(range.start as usize..range.end as usize).ok_or(ErrorKind::UnexpectedEof)?.to_vec();
        if self.lies.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |lies| lies.checked_sub(1)).is_ok() {
            let len = bytes.len();
            bytes[len.saturating_sub(3072)..].fill(0);
        }
        Ok(bytes)
    }
}

fn bytes(seed: u64, len: usize) -> Vec<u8> {
    Random(seed).bytes(len)
}

fn blocks(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).collect();
    paths.sort();
    paths
}

/// A shard of so many samples, of 2048 bytes each.
fn tar(samples: Range<usize>) -> Vec<u8> {
    let folder = tempdir().unwrap();
    let path = folder.path().join("a.tar");
    shard(&path, &files(samples));
    fs::read(path).unwrap()
}

fn keys(shards: &TarShards) -> Result<Vec<String>> {
    (0..shards.num_samples()).map(|index| Ok(shards.sample(index)?.key().to_string())).collect()
}

fn expected(samples: Range<usize>) -> Vec<String> {
    samples.map(|number| format!("{number:05}")).collect()
}

/// Train and validation data with one cache, whose shards have the same names and lengths.
#[test]
fn two_sources_are_two() {
    let (cache, indices) = (tempdir().unwrap(), tempdir().unwrap());
    let sources = [source("s3://train", tar(0..20)), source("s3://val", tar(50..70))];
    for _ in 0..2 {
        for (source, samples) in sources.iter().zip([0..20, 50..70]) {
            let cached = RangeCache::new(source.clone(), cache.path(), options()).unwrap();
            let shards = TarShards::remote(["0.tar"], cached, indices.path()).unwrap();
            assert_eq!(keys(&shards).unwrap(), expected(samples));
        }
    }
    assert_eq!(sources.map(|source| source.reads()), [3, 3]);
    // Without a name or a version there is nothing to find it by.
    let nameless = source("", tar(0..1));
    let untagged = source("s3://train", tar(0..1));
    untagged.change("", tar(0..1));
    for (source, text) in [(nameless, "ReadRange::location"), (untagged, "ReadRange::version")] {
        let cached = RangeCache::new(source.clone(), cache.path(), options()).unwrap();
        let error = cached.read_range("0.tar", 0..1).unwrap_err();
        assert!(error.kind() == ErrorKind::InvalidInput && error.to_string().contains(text), "{error}");
        let empty = tempdir().unwrap();
        assert_error(TarShards::remote(["0.tar"], source, empty.path()), &[text]);
    }
}

#[test]
fn a_file_that_changes_is_an_error_and_then_another_file() {
    let (cache, indices) = (tempdir().unwrap(), tempdir().unwrap());
    let source = source("s3://train", tar(0..20));
    let open = |indices: &Path| {
        let cached = RangeCache::new(source.clone(), cache.path(), options())?;
        TarShards::remote(["0.tar"], cached, indices)
    };
    let cached = RangeCache::new(source.clone(), cache.path(), options()).unwrap();
    cached.read_range("0.tar", 0..100).unwrap();
    open(indices.path()).unwrap();
    for changed in [tar(50..70), tar(50..90)] {
        source.change(&changed.len().to_string(), changed.clone());
        // The kept blocks belong to the old version, and nothing of the new version is read in their place.
        assert_eq!(cached.read_range("0.tar", 0..100).unwrap(), tar(0..20)[..100]);
        fs::remove_dir_all(cache.path()).unwrap();
        fs::create_dir(cache.path()).unwrap();
        assert_error(cached.read_range("0.tar", 0..100), &["0.tar has changed: it had 41984 bytes (1)"]);
        // The index belongs to the old version as well.
        assert_error(keys(&open(indices.path()).unwrap()), &["changed since its index was made", "remove "]);
        // For caches that are opened later, it is another file.
        let count = changed.len() / 2048;
        assert_eq!(keys(&open(tempdir().unwrap().path()).unwrap()).unwrap(), expected(50..50 + count));
        let again = RangeCache::new(source.clone(), cache.path(), options()).unwrap();
        assert_eq!(again.read_range("0.tar", 0..1 << 30).unwrap(), changed);
        source.change("1", tar(0..20));
        cached.read_range("0.tar", 0..100).unwrap();
    }
}

#[test]
fn damaged_blocks_are_read_again() {
    let content = bytes(1, 3 * BLOCK as usize - 7);
    let (cache, source) = (tempdir().unwrap(), source("s3://train", content.clone()));
    // One that has read it before, and one that has not.
    let known = RangeCache::new(source.clone(), cache.path(), options()).unwrap();
    known.read_range("a", 0..1 << 30).unwrap();
    let good: Vec<(PathBuf, Vec<u8>)> =
        blocks(cache.path()).into_iter().map(|path| (path.clone(), fs::read(path).unwrap())).collect();
    assert_eq!((good.len(), source.reads()), (3, 3));
    let (path, whole) = &good[0];
    let mut random = Random(5);
    for damage in 0..60 {
        let mut damaged = whole.clone();
        match damage {
            0 => damaged.clear(),
            1 => damaged.fill(0),
            2 => damaged.truncate(30),
            3 => damaged = good[1].1.clone(),
            4 => damaged.truncate(whole.len() - 1),
            _ => damaged[random.below(whole.len() as u64) as usize] ^= 1 << random.below(8),
        }
        fs::write(path, &damaged).unwrap();
        let new = RangeCache::new(source.clone(), cache.path(), options()).unwrap();
        let caches = if damage % 2 == 0 { [&known, &new] } else { [&new, &known] };
        for cache in caches {
            // In pieces, so that every part is read.
            for begin in (0..content.len()).step_by(6000) {
                let end = (begin + 6000).min(content.len());
                let read = cache.read_range("a", begin as u64..end as u64).unwrap();
                assert!(read == content[begin..end], "damage {damage} at {begin}");
            }
        }
        assert_eq!(source.reads(), 1, "damage {damage}");
        assert!(fs::read(path).unwrap() == *whole);
    }
    // A folder in its place cannot be replaced, and what is there is read all the same.
    fs::remove_file(path).unwrap();
    fs::create_dir(path).unwrap();
    assert!(known.read_range("a", 0..1 << 30).unwrap() == content);
    // Nor does it matter if the cache has gone.
    fs::remove_dir_all(cache.path()).unwrap();
    assert!(known.read_range("a", 0..1 << 30).unwrap() == content);
    fs::write(cache.path(), "a file").unwrap();
    assert!(known.read_range("a", 0..1 << 30).unwrap() == content);
    fs::remove_file(cache.path()).unwrap();
    fs::create_dir(cache.path()).unwrap();
}

#[test]
fn a_folder_of_others_is_refused() {
    let source = source("s3://train", bytes(1, 100));
    for name in ["notes", "mine.block", "0123456789abcdef-3.block", "0123.ddp-block", "mine.index", "sub"] {
        let folder = tempdir().unwrap();
        match name {
            "sub" => fs::create_dir(folder.path().join(name)).unwrap(),
            _ => fs::write(folder.path().join(name), "mine").unwrap(),
        }
        match RangeCache::new(source.clone(), folder.path(), options()) {
            Err(Error::InvalidArgument { argument: "folder", reason }) => {
                assert!(reason.contains(name) && reason.contains("choose an empty folder"), "{reason}");
            }
            other => panic!("{name}: {other:?}"),
        }
        assert!(folder.path().join(name).exists());
    }
    // The shards' indices may be there, and what a killed process has left is removed, but nothing of one that writes.
    let folder = tempdir().unwrap();
    let made = |name: &str| fs::File::create(folder.path().join(name)).unwrap();
    let left = ".0123456789abcdef.ddp-block.0123456789abcdef.tmp";
    let written = ".0123456789abcdef.ddp-block.1123456789abcdef.tmp";
    made(left);
    let lock = made(written);
    lock.lock().unwrap();
    for _ in 0..2 {
        let content = Arc::new(Source {
            content: Mutex::new(tar(0..3)),
            ..Arc::into_inner(self::source("s3://a", Vec::new())).unwrap()
        });
        let cache = RangeCache::new(content, folder.path(), options()).unwrap();
        TarShards::remote(["0.tar"], cache, folder.path()).unwrap();
        assert!(!folder.path().join(left).exists() && folder.path().join(written).exists());
    }
    assert_eq!(blocks(folder.path()).len(), 3);
}

/// An answer with zeros in place of the last file: it is kept, with its hash, and the headers tell.
#[test]
fn a_source_that_lied_is_asked_again() {
    // The last block has two samples and the end.
    let content = tar(0..20);
    let source = source("s3://train", content);
    let open = |cache: &Path, indices: &Path| {
        TarShards::remote(["0.tar"], RangeCache::new(source.clone(), cache, options())?, indices)
    };
    let (cache, indices) = (tempdir().unwrap(), tempdir().unwrap());
    // While the index is made.
    source.lies.store(1, Ordering::SeqCst);
    assert_eq!(keys(&open(cache.path(), indices.path()).unwrap()).unwrap(), expected(0..20));
    // And while samples are read.
    let cache = tempdir().unwrap();
    source.lies.store(1, Ordering::SeqCst);
    let shards = open(cache.path(), indices.path()).unwrap();
    assert_eq!(keys(&shards).unwrap(), expected(0..20));
    source.reads();
    assert_eq!(keys(&open(cache.path(), indices.path()).unwrap()).unwrap(), expected(0..20));
    assert_eq!(source.reads(), 0);
    // A source that says the same again is what is bad, with the place.
    let cache = tempdir().unwrap();
    source.lies.store(usize::MAX, Ordering::SeqCst);
    let shards = open(cache.path(), indices.path()).unwrap();
    assert_error(keys(&shards), &["0.tar", "the source says the same past the cache"]);
    assert_error(open(cache.path(), tempdir().unwrap().path()), &["0.tar", "so the source says, past the cache"]);
}

/// Zeros are a tar archive without files. Neither the cache nor the index keeps that.
#[test]
fn a_shard_that_was_once_zeros_is_read_again() {
    let content = tar(0..20);
    let source = source("s3://train", vec![0; content.len()]);
    let (cache, indices) = (tempdir().unwrap(), tempdir().unwrap());
    let open = || {
        let cache = RangeCache::new(source.clone(), cache.path(), options())?;
        TarShards::remote(["0.tar"], cache, indices.path())
    };
    assert_error(open(), &["there must be at least one sample"]);
    source.change("1", content);
    for _ in 0..2 {
        assert_eq!(keys(&open().unwrap()).unwrap(), expected(0..20));
    }
}
