//! Processes that are killed while a group is made.
//!
//! The test binary starts itself as each rank; ranks meet in a file in a temporary folder.
use crate::rank::Rank;
use crate::set_by::SetBy;
use candle_ddp_engine::CpuOptions;
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

#[test]
#[ignore = "started by other tests"]
fn rank_process() {
    let [rank, folder, key] = [RANK, FOLDER, KEY].map(|variable| std::env::var(variable).unwrap());
    let rank: usize = rank.parse().unwrap();
    let store = store_in(folder.as_ref());
    let options = CpuOptions { timeout: PATIENCE, ..CpuOptions::default() };
    // A store that kills this process once it has told the others something.
    let set = move |store: &Arc<dyn Store>, this: &str, value: &[u8]| {
        store.set(this, value)?;
        if this == key {
            kill_process(getpid(), Signal::KILL).unwrap();
        }
        Ok(())
    };
    let deadly = SetBy { store: Arc::new(store_in(folder.as_ref())), set };
    let made = Rank::new(Arc::new(deadly), rank, WORLD_SIZE, options);
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
