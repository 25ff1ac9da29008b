//! Processes that are killed while a group is made.
//!
//! The test binary starts itself as each rank; ranks meet in a file in a temporary folder.
use crate::rank::Rank;
use candle_ddp_engine::{CpuOptions, Result};
use candle_ddp_rendezvous::{FileStore, Store};
use rustix::process::{Signal, getpid, kill_process};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The wait where it shows only that something hangs.
const PATIENCE: Duration = Duration::from_secs(120);
const WORLD_SIZE: usize = 3;

const RANK: &str = "CANDLE_DDP_TEST_RANK";
const FOLDER: &str = "CANDLE_DDP_TEST_FOLDER";
/// The key after whose writing a rank is killed.
const KEY: &str = "CANDLE_DDP_TEST_KEY";

fn store_in(folder: &Path) -> FileStore {
    FileStore::open(folder.join("store"), PATIENCE).unwrap()
}

/// A store that kills this process once it has told the others something.
struct Deadly(FileStore, String);

impl Store for Deadly {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.0.set(key, value)?;
        if key == self.1 {
            kill_process(getpid(), Signal::KILL).unwrap();
        }
        Ok(())
    }

    fn get(&self, key: &str) -> Result<Vec<u8>> {
        self.0.get(key)
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        self.0.add(key, amount)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.0.compare_set(key, expected, desired)
    }

    fn wait(&self, keys: &[&str], timeout: Option<Duration>) -> Result<()> {
        self.0.wait(keys, timeout)
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        self.0.check(keys)
    }

    fn delete(&self, key: &str) -> Result<bool> {
        self.0.delete(key)
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.0.append(key, value)
    }

    fn multi_get(&self, keys: &[&str]) -> Result<Vec<Vec<u8>>> {
        self.0.multi_get(keys)
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        self.0.multi_set(pairs)
    }

    fn num_keys(&self) -> Result<usize> {
        self.0.num_keys()
    }

    fn timeout(&self) -> Duration {
        self.0.timeout()
    }
}

#[test]
#[ignore = "started by other tests"]
fn rank_process() {
    let [rank, folder, key] = [RANK, FOLDER, KEY].map(|variable| std::env::var(variable).unwrap());
    let rank: usize = rank.parse().unwrap();
    let store = store_in(folder.as_ref());
    let options = CpuOptions { timeout: PATIENCE, ..CpuOptions::default() };
    let made = Rank::new(Arc::new(Deadly(store_in(folder.as_ref()), key)), rank, WORLD_SIZE, options);
    let text = made.map_or_else(|error| error.to_string(), |made| format!("rank {} has made it", made.rank()));
    store.set(&format!("error/{rank}"), text.as_bytes()).unwrap();
}

/// A process that has said that it shares the memory of its host, and is killed before it uses that.
#[test]
fn a_rank_that_is_killed_before_the_others_begin_is_named_at_once() {
    for (victim, key) in [(1, "mapped/1"), (0, "host/0")] {
        let folder = tempfile::tempdir().unwrap();
        let rank = |rank: usize| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", "meeting::rank_process", "--include-ignored", "--nocapture"]);
            command.env(RANK, rank.to_string()).env(FOLDER, folder.path()).env(KEY, key);
            command.env("CANDLE_DDP_CPU_TRANSPORT", "shm").stdout(Stdio::null()).spawn().unwrap()
        };
        // A store ends with its last user.
        let store = store_in(folder.path());
        let begun = Instant::now();
        let ranks: Vec<_> = (0..WORLD_SIZE).map(rank).collect();
        for survivor in (0..WORLD_SIZE).filter(|rank| *rank != victim) {
            let error = String::from_utf8(store.get(&format!("error/{survivor}")).unwrap()).unwrap();
            assert!(error.starts_with(&format!("rank {victim} is gone: ")), "{key}: {error}");
        }
        assert!(begun.elapsed() < PATIENCE / 2, "they have waited for the time-out");
        ranks.into_iter().for_each(|mut rank| drop(rank.wait()));
    }
}
