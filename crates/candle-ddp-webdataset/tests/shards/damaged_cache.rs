//! Processes that read shards through one cache, while its files and the indices are damaged and processes are killed.
//!
//! The processes are this test binary itself.
use candle_ddp_testing::Random;
use candle_ddp_testing::tar_files::{files, shard};
use candle_ddp_testing::test_process;
use candle_ddp_webdataset::{FileVersion, RangeCache, RangeCacheOptions, ReadRange, Result, TarShards};
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

/// The variable that names the folder of the test.
const FOLDER: &str = "CANDLE_DDP_TEST_CACHE_FOLDER";
/// How often something is damaged; `CANDLE_DDP_TEST_CACHE_DAMAGES=100000` for a long run.
const DAMAGES: &str = "CANDLE_DDP_TEST_CACHE_DAMAGES";
const SHARDS: usize = 3;
const SAMPLES: usize = 40;

/// A folder of shards that lie elsewhere.
struct Elsewhere(PathBuf);

impl ReadRange for Elsewhere {
    fn location(&self, file: &str) -> String {
        format!("elsewhere/{file}")
    }

    fn version(&self, file: &str) -> io::Result<FileVersion> {
        Ok(FileVersion { len: self.0.join(file).metadata()?.len(), tag: "1".to_string() })
    }

    fn read_range(&self, file: &str, range: Range<u64>) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; (range.end - range.start) as usize];
        File::open(self.0.join(file))?.read_exact_at(&mut bytes, range.start)?;
        Ok(bytes)
    }
}

/// The entry point of readers: reads all samples again and again, through caches that are opened again and again.
#[test]
#[ignore = "started by other tests"]
fn reader_of_another_test() {
    let folder = PathBuf::from(std::env::var_os(FOLDER).unwrap());
    let mut random = Random(u64::from(std::process::id()));
    loop {
        // Other programs' files are an error, and so is an index that can no longer be recognised as one.
        if let Ok(shards) = open(&folder) {
            read(&shards, &mut random);
        }
    }
}

fn open(folder: &Path) -> Result<TarShards> {
    let options = RangeCacheOptions { max_bytes: 100_000, block_bytes: 9000, ..Default::default() };
    let cache = RangeCache::new(Elsewhere(folder.join("shards")), folder.join("cache"), options)?;
    TarShards::remote((0..SHARDS).map(|number| format!("{number}.tar")), cache, folder.join("indices"))
}

fn read(shards: &TarShards, random: &mut Random) {
    assert_eq!(shards.num_samples(), SHARDS * SAMPLES);
    for _ in 0..500 {
        let index = random.below(shards.num_samples() as u64) as usize;
        // The source is intact, so that every sample can be read.
        let sample = shards.sample(index).unwrap();
        let text = format!("content of {index:05}");
        assert_eq!((sample.files().count(), sample.get("cls")), (2, Some(&b"3"[..])));
        assert_eq!(sample.get("txt").map(|text| String::from_utf8_lossy(text).into_owned()), Some(text));
    }
}

fn reader(folder: &Path) -> Child {
    let mut command = test_process(module_path!(), "reader_of_another_test");
    command.env(FOLDER, folder).stdout(Stdio::null()).spawn().unwrap()
}

/// Damages a file of these folders, or makes two change places.
fn damage(folders: &[PathBuf], random: &mut Random) -> io::Result<()> {
    let folder = &folders[random.below(folders.len() as u64) as usize];
    let files: Vec<PathBuf> = folder.read_dir()?.map(|file| Ok(file?.path())).collect::<io::Result<_>>()?;
    if files.is_empty() {
        return Ok(());
    }
    let mut file = || &files[random.below(files.len() as u64) as usize];
    let (path, other) = (file(), file());
    let len = path.metadata()?.len().max(1);
    match random.below(5) {
        0 => fs::remove_file(path),
        1 => File::options().write(true).open(path)?.set_len(random.below(len)),
        2 => fs::rename(path, other),
        3 => File::options().write(true).open(path)?.write_all_at(&[0; 600], random.below(len)),
        _ => {
            let bits = [random.below(256) as u8];
            File::options().write(true).open(path)?.write_all_at(&bits, random.below(len))
        }
    }
}

#[test]
fn readers_get_the_sources_samples_whatever_happens_to_the_cache() {
    let folder = tempfile::tempdir().unwrap();
    let of = |name: &str| folder.path().join(name);
    ["shards", "cache", "indices"].iter().for_each(|name| fs::create_dir(of(name)).unwrap());
    for number in 0..SHARDS {
        shard(&of("shards").join(format!("{number}.tar")), &files(SAMPLES * number..SAMPLES * (number + 1)));
    }
    let damages: usize = std::env::var(DAMAGES).map_or(300, |count| count.parse().unwrap());
    let mut random = Random(damages as u64);
    let mut readers: Vec<Child> = (0..3).map(|_| reader(folder.path())).collect();
    for number in 0..damages {
        std::thread::sleep(Duration::from_millis(random.below(8)));
        // Readers create and remove files at the same time, so that one may be gone.
        let _ = damage(&[of("cache"), of("indices")], &mut random);
        if number % 20 == 0 {
            let place = random.below(readers.len() as u64) as usize;
            // A reader ends only by a sample that is not the source's.
            assert!(readers[place].try_wait().unwrap().is_none(), "a reader has ended after {number} damages");
            readers[place].kill().unwrap();
            readers[place].wait().unwrap();
            readers[place] = reader(folder.path());
        }
        if number % 50 == 0 {
            // Files that no reader may touch keep the readers out.
            of("indices").read_dir().unwrap().for_each(|file| drop(fs::remove_file(file.unwrap().path())));
        }
    }
    for mut reader in readers {
        assert!(reader.try_wait().unwrap().is_none(), "a reader has ended");
        reader.kill().unwrap();
        reader.wait().unwrap();
    }
    // Nobody is left, and the next one finds its way.
    of("indices").read_dir().unwrap().for_each(|file| fs::remove_file(file.unwrap().path()).unwrap());
    read(&open(folder.path()).unwrap(), &mut random);
}
