//! The CPU engine with a process for each rank, some of which are killed or stopped.
//!
//! The test binary runs itself again as its ranks; they meet through files in a temporary folder.
#![allow(clippy::unwrap_used)]
use candle_core::{DType, Device, Tensor};
use candle_ddp::backend::cpu::{CpuCommunicator, CpuOptions};
use candle_ddp::backend::{Collective, Communicator};
use candle_ddp::rendezvous::Store;
use candle_ddp::{Error, ReduceOp, Result};
use rustix::process::{Pid, Signal, kill_process};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(6);
const WORLD_SIZE: usize = 4;
const VICTIM: usize = 2;

/// What the ranks' data travels through, as the environment variable says it, and how many ranks a host has.
const TRANSPORTS: [(&str, usize); 3] = [("shm", WORLD_SIZE), ("tcp", WORLD_SIZE), ("auto", 2)];

const RANK: &str = "CANDLE_DDP_TEST_RANK";
const FOLDER: &str = "CANDLE_DDP_TEST_FOLDER";

/// The part of a store that the construction of a group needs: a file for each key.
struct Files(PathBuf);

impl Files {
    fn path(&self, key: &str) -> PathBuf {
        self.0.join(key.replace('/', "."))
    }
}

impl Store for Files {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let path = self.path(key);
        let unfinished = self.path(&format!("{key}.unfinished"));
        std::fs::write(&unfinished, value).unwrap();
        std::fs::rename(unfinished, path).unwrap();
        Ok(())
    }
    fn get(&self, key: &str) -> Result<Vec<u8>> {
        self.wait(&[key], None)?;
        Ok(std::fs::read(self.path(key)).unwrap())
    }
    fn wait(&self, keys: &[&str], timeout: Option<Duration>) -> Result<()> {
        let timeout = timeout.unwrap_or(TIMEOUT);
        let deadline = Instant::now() + timeout;
        while !self.check(keys)? {
            if Instant::now() > deadline {
                return Err(Error::StoreTimeout {
                    operation: format!("wait({keys:?})"),
                    store: self.0.display().to_string(),
                    timeout,
                    reason: "a test's rank has not come".into(),
                });
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
    fn check(&self, keys: &[&str]) -> Result<bool> {
        Ok(keys.iter().all(|key| self.path(key).exists()))
    }
    fn timeout(&self) -> Duration {
        TIMEOUT
    }
    fn add(&self, _: &str, _: i64) -> Result<i64> {
        unreachable!()
    }
    fn compare_set(&self, _: &str, _: &[u8], _: &[u8]) -> Result<Vec<u8>> {
        unreachable!()
    }
    fn delete(&self, _: &str) -> Result<bool> {
        unreachable!()
    }
    fn append(&self, _: &str, _: &[u8]) -> Result<()> {
        unreachable!()
    }
    fn multi_get(&self, _: &[&str]) -> Result<Vec<Vec<u8>>> {
        unreachable!()
    }
    fn multi_set(&self, _: &[(&str, &[u8])]) -> Result<()> {
        unreachable!()
    }
    fn num_keys(&self) -> Result<usize> {
        unreachable!()
    }
}

/// One rank, when the environment says so: all-reduces 16 MiB again and again until an error, which it writes down.
#[test]
fn rank_process() {
    let (Ok(rank), Ok(folder)) = (std::env::var(RANK), std::env::var(FOLDER)) else { return };
    let files = Arc::new(Files(folder.into()));
    let options = CpuOptions { timeout: TIMEOUT, ..CpuOptions::default() };
    let communicator = CpuCommunicator::new(files.clone(), rank.parse().unwrap(), WORLD_SIZE, options).unwrap();
    let tensor = Tensor::zeros(4 << 20, DType::F32, &Device::Cpu).unwrap();
    let all_reduce = || Collective::AllReduce { tensor: tensor.clone(), op: ReduceOp::Sum };
    for round in 0.. {
        let error = match round % 2 {
            0 => communicator.run(all_reduce()),
            _ => communicator.start(all_reduce()).and_then(|work| work.wait()),
        };
        if let Err(error) = error {
            files.set(&format!("error/{rank}"), error.to_string().as_bytes()).unwrap();
            return;
        }
        if round == 2 {
            files.set(&format!("ready/{rank}"), b"").unwrap();
        }
    }
}

/// Processes that end with the test.
struct Ranks(Vec<Child>);

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// One rank, when the environment says so: gives an inner part of its tensor to the next rank, which receives it into the
/// part before, and writes down that it did.
#[test]
fn halo_process() {
    const COUNT: usize = 1 << 18;
    let (Ok(rank), Ok(folder)) = (std::env::var(RANK), std::env::var(FOLDER)) else { return };
    let (files, rank): (_, usize) = (Arc::new(Files(folder.into())), rank.parse().unwrap());
    let options = CpuOptions { timeout: TIMEOUT, ..CpuOptions::default() };
    let communicator = CpuCommunicator::new(files.clone(), rank, WORLD_SIZE, options).unwrap();
    let field = Tensor::full(rank as f32, 2 * COUNT, &Device::Cpu).unwrap();
    let part = |index: usize| field.narrow(0, index * COUNT, COUNT).unwrap();
    let (left, right) = ((rank + WORLD_SIZE - 1) % WORLD_SIZE, (rank + 1) % WORLD_SIZE);
    let halo = communicator.start(Collective::Recv { tensor: part(0), peer: left }).unwrap();
    // By then all ranks wait for what they receive.
    std::thread::sleep(Duration::from_millis(300));
    let inner = communicator.start(Collective::Send { tensor: part(1), peer: right }).unwrap();
    halo.wait().and_then(|()| inner.wait()).unwrap();
    assert!(part(0).to_vec1::<f32>().unwrap().iter().all(|value| *value == left as f32));
    files.set(&format!("ready/{rank}"), b"").unwrap();
}

fn start(folder: &Path, transport: (&str, usize)) -> Ranks {
    start_as("rank_process", folder, transport)
}

/// Returns once all ranks, each of which is the test `body`, are ready.
fn start_as(body: &str, folder: &Path, (transport, host_size): (&str, usize)) -> Ranks {
    let rank = |rank: usize| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", body]).env(RANK, rank.to_string()).env(FOLDER, folder);
        command.env("CANDLE_DDP_CPU_TRANSPORT", transport);
        command.env("CANDLE_DDP_CPU_HOST", (rank / host_size).to_string());
        command.stdout(Stdio::null()).spawn().unwrap()
    };
    let ranks = Ranks((0..WORLD_SIZE).map(rank).collect());
    let files = Files(folder.into());
    let ready: Vec<String> = (0..WORLD_SIZE).map(|rank| format!("ready/{rank}")).collect();
    files.wait(&ready.iter().map(String::as_str).collect::<Vec<_>>(), Some(Duration::from_secs(60))).unwrap();
    ranks
}

/// The errors of all ranks but the victim, which must come within `limit`.
fn survivors(folder: &Path, limit: Duration) -> Vec<String> {
    let start = Instant::now();
    let files = Files(folder.into());
    let mut errors = Vec::new();
    for rank in (0..WORLD_SIZE).filter(|rank| *rank != VICTIM) {
        let key = format!("error/{rank}");
        files.wait(&[&key], Some(limit.saturating_sub(start.elapsed()))).unwrap();
        errors.push(String::from_utf8(files.get(&key).unwrap()).unwrap());
    }
    errors
}

#[test]
fn slices_of_one_tensor_cross_between_processes() {
    for transport in TRANSPORTS {
        let folder = tempfile::tempdir().unwrap();
        drop(start_as("halo_process", folder.path(), transport));
    }
}

#[test]
fn every_survivor_names_a_killed_rank_at_once() {
    for (transport, segments) in TRANSPORTS.into_iter().zip([WORLD_SIZE, 0, 2]) {
        let folder = tempfile::tempdir().unwrap();
        let mut ranks = start(folder.path(), transport);
        // They map the memory of their host, each one's once, and nothing else.
        for rank in &ranks.0 {
            let maps = std::fs::read_to_string(format!("/proc/{}/maps", rank.id())).unwrap();
            assert_eq!(maps.matches("/memfd:candle-ddp-").count(), segments, "{transport:?}: {maps}");
        }
        // Kills it in the middle of something else every time.
        std::thread::sleep(Duration::from_millis(u64::from(std::process::id() % 50)));
        ranks.0[VICTIM].kill().unwrap();
        // Much less than the time-out, which would end it, too; the rest is for slow machines.
        for error in survivors(folder.path(), TIMEOUT / 2) {
            assert!(error.starts_with("rank 2 is gone: its connection to rank "), "{transport:?}: {error}");
            assert!(error.contains("closed during all_reduce(f32[4194304])"), "{transport:?}: {error}");
        }
    }
}

#[test]
fn every_survivor_names_a_stopped_rank_in_time() {
    for transport in TRANSPORTS {
        let folder = tempfile::tempdir().unwrap();
        let ranks = start(folder.path(), transport);
        let pid = Pid::from_child(&ranks.0[VICTIM]);
        kill_process(pid, Signal::STOP).unwrap();
        let errors = survivors(folder.path(), TIMEOUT + Duration::from_secs(5));
        for error in errors {
            assert!(error.contains("all_reduce(f32[4194304])"), "{transport:?}: {error}");
            assert!(error.contains("timed out after 6s"), "{transport:?}: {error}");
            assert!(error.contains("rank 2 does not answer: its process is stopped"), "{transport:?}: {error}");
        }
    }
}

/// Shared memory has no name that could stay behind, and no descriptor that a child could inherit.
#[test]
fn nothing_is_left_of_killed_ranks() {
    let named = || -> Vec<String> {
        let entries = std::fs::read_dir("/dev/shm").into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    };
    let before = named();
    let folder = tempfile::tempdir().unwrap();
    let mut ranks = start(folder.path(), TRANSPORTS[0]);
    for rank in &ranks.0 {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", rank.id())).unwrap();
        assert!(maps.contains("/memfd:candle-ddp-"), "it does not use shared memory: {maps}");
        for descriptor in std::fs::read_dir(format!("/proc/{}/fd", rank.id())).unwrap().flatten() {
            let target = std::fs::read_link(descriptor.path()).unwrap_or_default();
            assert!(!target.to_string_lossy().contains("candle-ddp-"), "{target:?} is still open");
        }
    }
    for rank in &mut ranks.0 {
        rank.kill().unwrap();
        rank.wait().unwrap();
    }
    let left: Vec<String> = named().into_iter().filter(|name| !before.contains(name)).collect();
    assert!(left.iter().all(|name| !name.contains("candle")), "{left:?}");
}
