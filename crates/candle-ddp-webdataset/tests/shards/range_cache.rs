//! `TarShards::remote` and `RangeCache`: shards behind an HTTP server with ranges, one that fails, and one that is too slow.
use candle_ddp_testing::assert_error;
use candle_ddp_testing::http_server::{Mood, Server};
use candle_ddp_testing::tar_files::{files, shard};
use candle_ddp_webdataset::{Error, FileVersion, RangeCache, RangeCacheOptions, ReadRange, Result, TarShards};
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

impl Http {
    /// The length and the tag of an answer, and its body if there is one.
    fn ask(&self, request: &str) -> io::Result<(FileVersion, BufReader<TcpStream>)> {
        let mut connection = TcpStream::connect(self.address)?;
        connection.set_read_timeout(Some(self.timeout))?;
        write!(connection, "{request}\r\n\r\n")?;
        let mut reader = BufReader::new(connection);
        let mut lines = reader.by_ref().lines();
        let status = lines.next().ok_or(ErrorKind::UnexpectedEof)??;
        let mut version = FileVersion { len: 0, tag: String::new() };
        for line in lines.map_while(io::Result::ok).take_while(|line| !line.is_empty()) {
            match line.split_once(": ") {
                Some(("Content-Length", len)) => version.len = len.parse().map_err(io::Error::other)?,
                Some(("ETag", tag)) => version.tag = tag.to_string(),
                _ => {}
            }
        }
        match status.split(' ').nth(1) {
            Some("200" | "206") => Ok((version, reader)),
            Some("404") => Err(ErrorKind::NotFound.into()),
            _ => Err(io::Error::other(status)),
        }
    }
}

impl ReadRange for Http {
    fn location(&self, file: &str) -> String {
        format!("http://{}/{file}", self.address)
    }

    fn version(&self, file: &str) -> io::Result<FileVersion> {
        self.ask(&format!("HEAD /{file} HTTP/1.1")).map(|(version, _)| version)
    }

    fn read_range(&self, file: &str, range: Range<u64>) -> io::Result<Vec<u8>> {
        let (start, last) = (range.start, range.end - 1);
        let (version, mut reader) = self.ask(&format!("GET /{file} HTTP/1.1\r\nRange: bytes={start}-{last}"))?;
        let mut body = vec![0; version.len as usize];
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
    let sample = shards.sample(index)?;
    Ok(String::from_utf8(sample.get("txt").unwrap().to_vec()).unwrap())
}

fn bytes_in(folder: &Path) -> u64 {
    fs::read_dir(folder).unwrap().map(|file| file.unwrap().metadata().unwrap().len()).sum()
}

#[test]
fn shards_behind_http_are_read_once_by_all_ranks() {
    let (server, cache, indices) = (server(), tempdir().unwrap(), tempdir().unwrap());
    std::thread::scope(|scope| {
        for rank in 0..3 {
            let (server, cache, indices) = (&server, cache.path(), indices.path());
            scope.spawn(move || {
                let shards = open(server, cache, indices).unwrap();
                for index in (0..40).skip(rank).step_by(3) {
                    assert_eq!(text(&shards, index).unwrap(), format!("content of {index:05}"));
                }
            });
        }
    });
    // 11 blocks of each shard, and the version before them and after each; the ranks' caches are not the same one.
    assert!((2 * 23..=3 * 2 * 23).contains(&server.requests()), "{} requests", server.requests());
    // Whoever comes later reads nothing again, and asks for the versions of the shards that it reads.
    server.in_mood(Mood::Well);
    let shards = open(&server, cache.path(), indices.path()).unwrap();
    assert_eq!((shards.num_samples(), server.requests()), (40, 0));
    (20..40).for_each(|index| assert_eq!(text(&shards, index).unwrap(), format!("content of {index:05}")));
    assert_eq!(server.requests(), 1);
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
        match shards.sample(25) {
            Err(Error::DataFile { path, reason }) => {
                assert_eq!(path, Path::new("train/1.tar"));
                assert!(text.iter().all(|text| reason.contains(text)), "{reason}");
            }
            other => panic!("{other:?}"),
        }
        // The first attempt, and two more.
        let expected = if mood == Mood::Cut { 1 + 3 } else { 3 };
        // The server may read a request only after the client has given up.
        while server.requests() < expected {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(server.requests(), expected);
        assert_eq!(bytes_in(empty.path()), 0);
    };
    // Sample 25 is the sixth of its shard, which have 2048 bytes each.
    let place = "at byte 10240: reading 2048 bytes: bytes 8192..12288 of train/1.tar, attempt 3: ";
    let version = "the version of train/1.tar, attempt 3: ";
    fails(Mood::Failing(usize::MAX), Duration::from_secs(60), &[version, "503"]);
    fails(Mood::Cut, Duration::from_secs(60), &[place]);
    fails(Mood::Silent, Duration::from_millis(100), &[version]);
    // A missing file does not appear by waiting.
    server.in_mood(Mood::Well);
    let source = RangeCache::new(http(&server), cache.path(), options()).unwrap();
    assert_error(TarShards::remote(["nothing.tar"], source, indices.path()), &["nothing.tar", "attempt 1"]);
    assert_eq!(server.requests(), 1);
}

/// A source that counts what is read, and ends its answers early if it is told so.
struct Counting {
    len: u64,
    reads: AtomicUsize,
    short_by: u64,
}

impl ReadRange for Counting {
    fn location(&self, file: &str) -> String {
        format!("counting/{file}")
    }

    fn version(&self, _: &str) -> io::Result<FileVersion> {
        Ok(FileVersion { len: self.len, tag: "1".to_string() })
    }

    fn read_range(&self, _: &str, range: Range<u64>) -> io::Result<Vec<u8>> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        assert!(!range.is_empty() && range.end <= self.len, "{range:?}");
        Ok((range.start..range.end - self.short_by).map(|at| (at % 251) as u8).collect())
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
            let expected: Vec<u8> = (begin..end.min(source.len)).map(|at| (at % 251) as u8).collect();
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
    // A little more than five blocks, for their heads.
    let options = RangeCacheOptions { max_bytes: 5 * BLOCK + 1000, ..options() };
    let cache = RangeCache::new(source.clone(), folder.path(), options).unwrap();
    // Other programs' files that appear later. Neither the end of their names nor the whole name makes them blocks.
    let others = ["notes", "mine.block", "0123456789abcdef.ddp-block"].map(|name| folder.path().join(name));
    others.iter().for_each(|path| fs::write(path, "are not the cache's").unwrap());
    for block in 0..100 {
        cache.read_range("a", block * BLOCK..block * BLOCK + 10).unwrap();
        let kept = fs::read_dir(folder.path()).unwrap().count() - others.len();
        assert_eq!(kept, (block + 1).min(5) as usize, "after block {block}");
    }
    assert!(others.iter().all(|path| fs::read(path).unwrap() == b"are not the cache's"));
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
    assert_error(cache.read_range("a", 0..10), &["bytes 0..4096 of a, attempt 3", "gave 4095 bytes"]);
    assert_eq!(bytes_in(folder.path()), 0);
}
