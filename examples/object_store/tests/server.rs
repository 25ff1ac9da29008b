//! The bucket against a server, as an HTTP store and as an S3 store: one that answers, one that fails and one that is slow.
use candle_ddp::data::{Dataset, FileVersion, RangeCache, RangeCacheOptions, ReadRange, TarShards};
use candle_ddp::seed::Generator;
use candle_ddp::{Error, Result};
use candle_ddp_testing::http_server::{Mood, Server};
use candle_ddp_testing::tar_files;
use object_store::aws::AmazonS3Builder;
use object_store::path::Path;
use object_store::{ClientOptions, RetryConfig};
use object_store_shards::Bucket;
use std::fs;
use std::io::ErrorKind;
use std::process::Command;
use std::time::Duration;
use tempfile::tempdir;

const NAMES: [&str; 2] = ["0.tar", "1.tar"];

/// Two shards of 20 samples in the folder `train` of the bucket `data`.
fn server() -> Server {
    let folder = tempdir().unwrap();
    let shard = |number: usize| {
        let path = folder.path().join("shard.tar");
        tar_files::shard(&path, &tar_files::files(20 * number..20 * (number + 1)));
        (format!("data/train/{number}.tar"), fs::read(path).unwrap())
    };
    Server::start([shard(0), shard(1)].into())
}

/// The bucket as an S3 store whose requests may take so long.
fn s3(server: &Server, timeout: Duration) -> Bucket {
    let store = AmazonS3Builder::new()
        .with_endpoint(format!("http://{}", server.address))
        .with_bucket_name("data")
        .with_access_key_id("key")
        .with_secret_access_key("secret")
        .with_client_options(ClientOptions::new().with_allow_http(true).with_timeout(timeout))
        .with_retry(RetryConfig { max_retries: 0, ..Default::default() });
    let url = format!("http://{}/data/train", server.address);
    Bucket::new(Box::new(store.build().unwrap()), url, Path::from("train")).unwrap()
}

const PATIENT: Duration = Duration::from_secs(60);

fn cached(bucket: Bucket, folder: &std::path::Path) -> Result<TarShards> {
    let options = RangeCacheOptions { block_bytes: 4096, retries: 2, pause: Duration::ZERO, ..Default::default() };
    Ok(TarShards::remote(NAMES, RangeCache::new(bucket, folder.join("blocks"), options)?, folder)?)
}

fn text(shards: &TarShards, index: usize) -> Result<String> {
    let sample = shards.get(index, &mut Generator::new(0))?;
    Ok(String::from_utf8(sample.get("txt").unwrap().to_vec()).unwrap())
}

#[test]
fn a_range_is_what_the_file_has() {
    let server = server();
    for bucket in [s3(&server, PATIENT), Bucket::open(&format!("http://{}/data/train", server.address)).unwrap()] {
        let FileVersion { len, tag } = bucket.version("0.tar").unwrap();
        assert!(len > 40_000 && len.is_multiple_of(512), "{len}");
        assert_ne!(bucket.version("1.tar").unwrap().tag, tag);
        assert_eq!(bucket.location("0.tar"), format!("http://{}/data/train/0.tar", server.address));
        let all = bucket.read_range("0.tar", 0..len).unwrap();
        assert_eq!(all.len() as u64, len);
        for range in [0..1, 511..1025, len - 3..len] {
            let expected = &all[range.start as usize..range.end as usize];
            assert_eq!(bucket.read_range("0.tar", range.clone()).unwrap(), expected);
        }
        assert_eq!(bucket.read_range("nothing.tar", 0..1).unwrap_err().kind(), ErrorKind::NotFound);
        assert_eq!(bucket.version("nothing.tar").unwrap_err().kind(), ErrorKind::NotFound);
    }
    // Whoever tries again is the cache.
    server.in_mood(Mood::Failing(1));
    Bucket::open(&format!("http://{}/data/train", server.address)).unwrap().read_range("0.tar", 0..1).unwrap_err();
    assert_eq!(Bucket::open("file:///tmp").unwrap_err().kind(), ErrorKind::Unsupported);
}

#[test]
fn shards_of_a_bucket_are_read_by_several_ranks() {
    let (server, folder) = (server(), tempdir().unwrap());
    // Failures at the beginning do not show.
    server.in_mood(Mood::Failing(2));
    candle_ddp::spawn(2, |pg| {
        let shards = cached(s3(&server, PATIENT), folder.path())?;
        for index in (0..40).skip(pg.rank()).step_by(2) {
            assert_eq!(text(&shards, index)?, format!("content of {index:05}"));
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_server_that_fails_or_is_slow_is_an_error_in_the_end() {
    let (server, folder) = (server(), tempdir().unwrap());
    cached(s3(&server, PATIENT), folder.path()).unwrap();
    for (mood, timeout) in
        [(Mood::Failing(usize::MAX), PATIENT), (Mood::Silent, Duration::from_millis(100)), (Mood::Cut, PATIENT)]
    {
        fs::remove_dir_all(folder.path().join("blocks")).unwrap();
        // The indices are there, so nothing is read yet.
        let shards = cached(s3(&server, timeout), folder.path()).unwrap();
        server.in_mood(mood);
        match text(&shards, 25) {
            Err(Error::DataFile { path, reason }) => {
                assert_eq!(path, std::path::Path::new("1.tar"));
                // Sample 25 is the sixth of its shard, which have 2048 bytes each.
                let place = "at byte 10240: reading 2048 bytes: bytes 8192..12288 of 1.tar, attempt 3: ";
                let place = if mood == Mood::Cut { place } else { "the version of 1.tar, attempt 3: " };
                assert!(reason.contains(place), "{reason}");
            }
            other => panic!("{other:?}"),
        }
        // The bucket itself does not try again: after the version, if that is given, there are three attempts.
        assert_eq!(server.requests(), if mood == Mood::Cut { 4 } else { 3 });
        server.in_mood(Mood::Well);
    }
}

#[test]
fn the_program_reads_every_sample() {
    let server = server();
    let host = format!("http://{}", server.address);
    for url in [&*format!("{host}/data/train"), "s3://data/train"] {
        let cache = tempdir().unwrap();
        let mut program = Command::new(env!("CARGO_BIN_EXE_object_store_shards"));
        program.args([url, "0.tar", "1.tar", "--cache"]).arg(cache.path());
        program.envs([("AWS_ENDPOINT", &*host), ("AWS_ALLOW_HTTP", "true")]);
        program.envs([("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret")]);
        let output = program.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        // Each has 16 bytes of text and one of its class.
        assert!(output.status.success() && text.contains("rank 0 read 40 samples, 680 bytes"), "{text}");
    }
}

/// docs/shards.md shows `src/lib.rs` without its first line.
#[test]
fn the_page_on_data_shows_this_code() {
    let (page, code) = (include_str!("../../../docs/shards.md"), include_str!("../src/lib.rs"));
    let (_, code) = code.split_once('\n').unwrap();
    assert!(page.contains(&format!("```rust,ignore\n{code}```")), "copy src/lib.rs to docs/shards.md");
}
