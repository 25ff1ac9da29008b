//! `TarShards::remote` and `RangeCache`: shards behind an HTTP server with ranges, one that fails, and one that is too slow.
use crate::common::ranks;
use crate::http_server::{Mood, Server};
use crate::tar_files::{files, shard};
use candle_ddp::data::{Dataset, RangeCache, RangeCacheOptions, ReadRange, TarShards};
use candle_ddp::seed::Generator;
use candle_ddp::{Error, Result};
use std::fs;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;
use tempfile::tempdir;

/// The client that a program would have of a library.
struct Http {
    address: SocketAddr,
    timeout: Duration,
}

impl ReadRange for Http {
    fn read_range(&self, file: &str, range: Range<u64>) -> io::Result<Vec<u8>> {
        let mut connection = TcpStream::connect(self.address)?;
        connection.set_read_timeout(Some(self.timeout))?;
        write!(connection, "GET /{file} HTTP/1.1\r\nRange: bytes={}-{}\r\n\r\n", range.start, range.end - 1)?;
        let mut reader = BufReader::new(connection);
        let mut lines = reader.by_ref().lines();
        let status = lines.next().ok_or(ErrorKind::UnexpectedEof)??;
        let mut length = 0;
        for line in lines.map_while(io::Result::ok).take_while(|line| !line.is_empty()) {
            if let Some(found) = line.strip_prefix("Content-Length: ") {
                length = found.parse().map_err(io::Error::other)?;
            }
        }
        match status.split(' ').nth(1) {
            Some("206") => {}
            Some("416") => return Ok(Vec::new()),
            Some("404") => return Err(ErrorKind::NotFound.into()),
            _ => return Err(io::Error::other(status)),
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body)?;
        Ok(body)
    }
}

const BLOCK: u64 = 4096;

fn options() -> RangeCacheOptions {
    RangeCacheOptions { max_bytes: 64 * BLOCK, block_bytes: BLOCK, retries: 2, pause: Duration::ZERO }
}

/// Two shards of 20 samples, of 42,000 bytes each, behind a server.
fn server() -> Server {
    let folder = tempdir().unwrap();
    let shard = |number: usize| {
        let path = folder.path().join("shard.tar");
        shard(&path, &files(20 * number..20 * (number + 1)));
        (format!("train/{number}.tar"), fs::read(path).unwrap())
    };
    Server::start([shard(0), shard(1)].into())
}

const NAMES: [&str; 2] = ["train/0.tar", "train/1.tar"];

fn http(server: &Server) -> Http {
    Http { address: server.address, timeout: Duration::from_secs(60) }
}

fn open(server: &Server, cache: &Path, indices: &Path) -> Result<TarShards> {
    TarShards::remote(NAMES, RangeCache::new(http(server), cache, options())?, indices)
}

fn text(shards: &TarShards, index: usize) -> Result<String> {
    let sample = shards.get(index, &mut Generator::new(0))?;
    Ok(String::from_utf8(sample.get("txt").unwrap().to_vec()).unwrap())
}

fn bytes_in(folder: &Path) -> u64 {
    fs::read_dir(folder).unwrap().map(|file| file.unwrap().metadata().unwrap().len()).sum()
}

#[test]
fn shards_behind_http_are_read_once_by_all_ranks() {
    let (server, cache, indices) = (server(), tempdir().unwrap(), tempdir().unwrap());
    // No rank is done before all have read.
    ranks(3, |pg| {
        let shards = open(&server, cache.path(), indices.path())?;
        for index in (0..40).skip(pg.rank()).step_by(3) {
            assert_eq!(text(&shards, index)?, format!("content of {index:05}"));
        }
        pg.barrier()
    })
    .unwrap();
    // 11 blocks of each shard, the last of which needs another request; the ranks' caches are not the same one.
    assert!((2 * 12..=3 * 2 * 12).contains(&server.requests()), "{} requests", server.requests());
    // Whoever comes later reads nothing again, even if nobody answers.
    server.in_mood(Mood::Silent);
    let shards = open(&server, cache.path(), indices.path()).unwrap();
    assert_eq!((shards.len(), text(&shards, 39).unwrap()), (40, "content of 00039".to_string()));
    assert_eq!(server.requests(), 0);
}

#[test]
fn reads_that_fail_are_tried_again_and_end() {
    let (server, cache, indices) = (server(), tempdir().unwrap(), tempdir().unwrap());
    server.in_mood(Mood::Failing(2));
    let shards = open(&server, cache.path(), indices.path()).unwrap();
    assert_eq!(text(&shards, 25).unwrap(), "content of 00025");

    let fails = |mood, timeout, text: &[&str]| {
        server.in_mood(mood);
        let empty = tempdir().unwrap();
        let source = RangeCache::new(Http { timeout, ..http(&server) }, empty.path(), options()).unwrap();
        let shards = TarShards::remote(NAMES, source, indices.path()).unwrap();
        match shards.get(25, &mut Generator::new(0)) {
            Err(Error::DataFile { path, reason }) => {
                assert_eq!(path, Path::new("train/1.tar"));
                assert!(text.iter().all(|text| reason.contains(text)), "{reason}");
            }
            other => panic!("{other:?}"),
        }
        // The first attempt, and two more.
        assert_eq!(server.requests(), 3);
        assert_eq!(bytes_in(empty.path()), 0);
    };
    // Sample 25 is the sixth of its shard, which have 2048 bytes each.
    let place = "at byte 10240: reading 2048 bytes: bytes 8192..12288 of train/1.tar, attempt 3: ";
    fails(Mood::Failing(usize::MAX), Duration::from_secs(60), &[place, "503"]);
    fails(Mood::Cut, Duration::from_secs(60), &[place]);
    fails(Mood::Silent, Duration::from_millis(100), &[place]);
    // A missing file does not appear by waiting.
    server.in_mood(Mood::Well);
    let source = RangeCache::new(http(&server), cache.path(), options()).unwrap();
    let error = TarShards::remote(["nothing.tar"], source, indices.path()).unwrap_err().to_string();
    assert!(error.contains("nothing.tar") && error.contains("attempt 1"), "{error}");
    assert_eq!(server.requests(), 1);
}

/// A source that counts what is read, and ends its answers early if it is told so.
struct Counting {
    len: u64,
    reads: AtomicUsize,
    short_by: u64,
}

impl ReadRange for Counting {
    fn read_range(&self, _: &str, range: Range<u64>) -> io::Result<Vec<u8>> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        let end = range.end.min(self.len);
        let begin = range.start.min(end);
        let end = if end > begin + 1 { end - self.short_by } else { end };
        Ok((begin..end).map(|at| (at % 251) as u8).collect())
    }
}

fn counting(len: u64, short_by: u64) -> Arc<Counting> {
    Arc::new(Counting { len, reads: AtomicUsize::new(0), short_by })
}

#[test]
fn any_range_is_what_the_source_has() {
    let (source, folder) = (counting(10 * BLOCK + 5, 0), tempdir().unwrap());
    let cache = RangeCache::new(source.clone(), folder.path(), options()).unwrap();
    let ends = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 10 * BLOCK, 10 * BLOCK + 5, 10 * BLOCK + 6, 30 * BLOCK];
    for begin in ends {
        for end in ends.into_iter().filter(|end| *end >= begin) {
            let expected = source.read_range("a", begin..end).unwrap();
            assert_eq!(cache.read_range("a", begin..end).unwrap(), expected, "{begin}..{end}");
        }
    }
    let full = RangeCacheOptions { max_bytes: BLOCK, ..options() };
    for (options, folder) in [(full, "."), (RangeCacheOptions { block_bytes: 0, ..full }, "zero")] {
        let made = RangeCache::new(counting(1, 0), folder, RangeCacheOptions { max_bytes: BLOCK - 1, ..options });
        assert!(matches!(made, Err(Error::InvalidArgument { argument: "block_bytes", .. })), "{made:?}");
    }
}

#[test]
fn a_cache_keeps_no_more_than_its_limit() {
    let (source, folder) = (counting(100 * BLOCK, 0), tempdir().unwrap());
    let options = RangeCacheOptions { max_bytes: 5 * BLOCK, ..options() };
    let cache = RangeCache::new(source.clone(), folder.path(), options).unwrap();
    fs::write(folder.path().join("notes"), "are not the cache's").unwrap();
    for block in 0..100 {
        cache.read_range("a", block * BLOCK..block * BLOCK + 10).unwrap();
        let kept = bytes_in(folder.path()) - 19;
        assert_eq!(kept, (block + 1).min(5) * BLOCK, "after block {block}");
    }
    assert_eq!(source.reads.load(Ordering::SeqCst), 100);
    // The last ones are there, and the first ones are not.
    cache.read_range("a", 98 * BLOCK..100 * BLOCK).unwrap();
    assert_eq!(source.reads.load(Ordering::SeqCst), 100);
    cache.read_range("a", 0..1).unwrap();
    assert_eq!(source.reads.load(Ordering::SeqCst), 101);
}

#[test]
fn threads_that_want_the_same_block_read_it_once() {
    let (source, folder) = (counting(BLOCK, 0), tempdir().unwrap());
    let cache = RangeCache::new(source.clone(), folder.path(), options()).unwrap();
    let together = Barrier::new(8);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                together.wait();
                assert_eq!(cache.read_range("a", 7..9).unwrap(), [7, 8]);
            });
        }
    });
    assert_eq!(source.reads.load(Ordering::SeqCst), 1);
}

/// Otherwise the file would seem to end there, for as long as the cache is kept.
#[test]
fn short_answers_are_not_kept() {
    let (source, folder) = (counting(3 * BLOCK, 1), tempdir().unwrap());
    let cache = RangeCache::new(source, folder.path(), options()).unwrap();
    let error = cache.read_range("a", 0..10).unwrap_err().to_string();
    assert!(error.contains("bytes 0..4096 of a, attempt 3") && error.contains("gave 4095 bytes"), "{error}");
    assert_eq!(bytes_in(folder.path()), 0);
}
