//! Ranks as processes, on one or several GPUs.
use crate::common::{skip, skip_unless, test_process};
use candle_ddp::backend::nccl::device_count;
use candle_ddp::{Result, Work};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The time-out in seconds of a group whose calls expire. It is also that of the ranks' start on a busy machine.
pub(crate) const SHORT: u64 = 20;
/// The variable that names a rank's job; unset in the test's own process.
const JOB: &str = "CANDLE_DDP_TEST_JOB";
/// The folder in which ranks rendezvous and write their results.
const FOLDER: &str = "CANDLE_DDP_TEST_FOLDER";

/// NCCL accepts several ranks on one GPU if each seems to be on its own host.
pub(crate) const SHARED: [(&str, &str); 12] = [
    ("CANDLE_DDP_ALLOW_SHARED_GPU", "1"),
    ("NCCL_MULTI_RANK_GPU_ENABLE", "1"),
    ("NCCL_NET", "Socket"),
    ("NCCL_IB_DISABLE", "1"),
    ("NCCL_SOCKET_IFNAME", "lo"),
    ("NCCL_P2P_DISABLE", "1"),
    ("NCCL_SHM_DISABLE", "1"),
    ("NCCL_MNNVL_ENABLE", "0"),
    ("NCCL_NVLS_ENABLE", "0"),
    ("NCCL_CUMEM_HOST_ENABLE", "0"),
    ("NCCL_RAS_ENABLE", "0"),
    ("NCCL_MAX_CTAS", "2"),
];

/// Returns the number of GPUs. Without any, reports that `test` is skipped, or fails if `CANDLE_DDP_REQUIRE_GPU` is
/// set.
pub(crate) fn gpus(test: &str) -> Option<usize> {
    let reason = match device_count() {
        Ok(count) => return Some(count),
        Err(reason) => reason,
    };
    skip_unless("CANDLE_DDP_REQUIRE_GPU", test, reason);
    None
}

/// The same for the GPUs of `tests/emulated_gpu`, which can inject failures. Others are none.
pub(crate) fn emulated_gpus(test: &str) -> Option<usize> {
    let found = gpus(test)?;
    if !is_emulated() {
        skip(test, "only an emulated GPU can inject failures");
    }
    is_emulated().then_some(found)
}

/// Whether the GPU is the one of `tests/emulated_gpu`.
pub(crate) fn is_emulated() -> bool {
    std::env::var("LD_PRELOAD").is_ok_and(|libraries| libraries.contains("emulated_gpu"))
}

/// A rank's process: its job and its parameters.
pub(crate) struct Worker {
    pub(crate) job: String,
    folder: PathBuf,
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
}

impl Worker {
    pub(crate) fn of_this_process() -> Self {
        let number = |name| std::env::var(name).unwrap().parse().unwrap();
        let job = std::env::var(JOB).unwrap();
        let folder = PathBuf::from(std::env::var_os(FOLDER).unwrap());
        Self { job, folder, rank: number("RANK"), world_size: number("WORLD_SIZE") }
    }

    pub(crate) fn store(&self) -> PathBuf {
        self.folder.join("store")
    }

    pub(crate) fn traces(&self) -> PathBuf {
        self.folder.join("traces")
    }

    /// Reports a result to the test.
    pub(crate) fn report(&self, text: &str) {
        std::fs::write(report_of(&self.folder, self.rank), text).unwrap();
    }

    /// Waits until another rank has reported its result.
    pub(crate) fn await_report(&self, rank: usize) {
        let deadline = Instant::now() + PATIENCE;
        while !report_of(&self.folder, rank).exists() {
            assert!(Instant::now() < deadline, "rank {rank} reports nothing");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Signals to the test that this rank is in the middle of its job.
    pub(crate) fn sign(&self) {
        std::fs::write(sign_of(&self.folder, self.rank), "").unwrap();
    }

    /// Repeats a call until one fails, and returns its error.
    pub(crate) fn until_failure(&self, start: impl Fn() -> Result<Work>) -> String {
        loop {
            match start().and_then(|work| work.synchronize()) {
                Ok(()) => self.sign(),
                Err(error) => return error.to_string(),
            }
        }
    }
}

fn report_of(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("report{rank}"))
}

fn sign_of(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("sign{rank}"))
}

/// An environment variable and its value.
type Variable = (&'static str, &'static str);

/// The ranks of a job.
pub(crate) struct Ranks {
    children: Vec<Child>,
    folder: TempDir,
}

const PATIENCE: Duration = Duration::from_secs(300);

impl Ranks {
    /// Starts the ranks, on one GPU each if there are enough.
    pub(crate) fn start(world_size: usize, job: &str) -> Self {
        Self::start_in(world_size, job, |_| [])
    }

    pub(crate) fn start_without_sharing(world_size: usize, job: &str, variable: Option<Variable>) -> Self {
        Self::start_with(world_size, job, false, |_| variable)
    }

    /// Starts the ranks, each with the environment variables that `variables` returns for it.
    pub(crate) fn start_in<V: IntoIterator<Item = Variable>>(
        world_size: usize,
        job: &str,
        variables: impl Fn(usize) -> V,
    ) -> Self {
        Self::start_with(world_size, job, device_count().unwrap_or(0) < world_size, variables)
    }

    /// The same. `shared` says whether several of them use one GPU.
    pub(crate) fn start_with<V: IntoIterator<Item = Variable>>(
        world_size: usize,
        job: &str,
        shared: bool,
        variables: impl Fn(usize) -> V,
    ) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let start = |rank: usize| {
            let output = File::create(folder.path().join(format!("output{rank}"))).unwrap();
            let mut command = test_process("gpu", "rank_of_another_test");
            command.env(JOB, job).env(FOLDER, folder.path());
            command.env("RANK", rank.to_string()).env("WORLD_SIZE", world_size.to_string());
            command.env("LOCAL_RANK", rank.to_string()).env("LOCAL_WORLD_SIZE", world_size.to_string());
            if shared {
                command.envs(SHARED).env("NCCL_HOSTID", format!("rank{rank}"));
            }
            command.envs(variables(rank));
            command.stdout(output.try_clone().unwrap()).stderr(output).spawn().unwrap()
        };
        let children = (0..world_size).map(start).collect();
        Self { children, folder }
    }

    fn output(&self, rank: usize) -> String {
        std::fs::read_to_string(self.folder.path().join(format!("output{rank}"))).unwrap_or_default()
    }

    /// Waits for rank `rank` and returns whether it succeeded.
    fn wait(&mut self, rank: usize, deadline: Instant) -> bool {
        loop {
            if let Some(status) = self.children[rank].try_wait().unwrap() {
                return status.success();
            }
            assert!(Instant::now() < deadline, "rank {rank} hangs:\n{}", self.output(rank));
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until all ranks have succeeded and returns their reports.
    pub(crate) fn finish(mut self) -> Vec<String> {
        let ranks: Vec<usize> = (0..self.children.len()).collect();
        self.reports(&ranks)
    }

    /// Waits until all ranks have succeeded and returns their output.
    pub(crate) fn finish_with_outputs(mut self) -> Vec<String> {
        let ranks: Vec<usize> = (0..self.children.len()).collect();
        self.reports(&ranks);
        self.outputs()
    }

    /// Waits until these ranks have succeeded and returns their reports.
    pub(crate) fn reports(&mut self, ranks: &[usize]) -> Vec<String> {
        let deadline = Instant::now() + PATIENCE;
        for &rank in ranks {
            assert!(self.wait(rank, deadline), "rank {rank} failed:\n{}", self.output(rank));
        }
        ranks
            .iter()
            .map(|rank| std::fs::read_to_string(report_of(self.folder.path(), *rank)).unwrap_or_default())
            .collect()
    }

    /// Waits until all ranks have exited and returns their output.
    pub(crate) fn outputs(mut self) -> Vec<String> {
        let deadline = Instant::now() + PATIENCE;
        (0..self.children.len())
            .map(|rank| {
                self.wait(rank, deadline);
                self.output(rank)
            })
            .collect()
    }

    /// Waits until all ranks are in the middle of their job.
    pub(crate) fn await_signs(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        for rank in 0..self.children.len() {
            while !sign_of(self.folder.path(), rank).exists() {
                assert!(self.children[rank].try_wait().unwrap().is_none(), "rank {rank} ended:\n{}", self.output(rank));
                assert!(Instant::now() < deadline, "rank {rank} does not start:\n{}", self.output(rank));
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }

    /// Sends a rank a signal, such as STOP.
    pub(crate) fn signal(&self, rank: usize, signal: &str) {
        let pid = self.children[rank].id().to_string();
        assert!(Command::new("kill").args(["-s", signal, &pid]).status().unwrap().success());
    }

    /// Kills a rank, as the system does when memory is short.
    pub(crate) fn kill(&mut self, rank: usize) {
        self.children[rank].kill().unwrap();
        self.children[rank].wait().unwrap();
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
