//! Ranks of `elastic::run` that are processes and are killed.
//!
//! The processes are the test binary itself; environment variables make it a rank, and say when it kills itself.
#![allow(dead_code, clippy::unwrap_used)] // each test file uses only some helpers, and a failed test may panic
use crate::common::{Mlp, fill, floats, tensor};
use candle_core::{DType, Device, IndexOp, Tensor};
use candle_ddp::checkpoint::{Parts, StateDict};
use candle_ddp::data::LoaderState;
use candle_ddp::elastic::{self, ElasticOptions, State};
use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW, ParamsStepLr, StepLr};
use candle_ddp::seed::Generator;
use candle_ddp::{DistributedDataParallel, Error, InitOptions, ProcessGroup, Result};
use candle_nn::{VarBuilder, VarMap};
use rustix::process::{Signal, getpid, kill_process};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The events of ranks, as a list of `RANK WHERE COMMIT`. The folder of the test records those that have happened.
pub(crate) const EVENTS: &str = "CANDLE_DDP_TEST_ELASTIC";
pub(crate) const FOLDER: &str = "CANDLE_DDP_TEST_FOLDER";
pub(crate) const MIN: &str = "CANDLE_DDP_TEST_MIN";
/// The seconds for which ranks without a launcher wait for each other.
pub(crate) const LAST_CALL: &str = "CANDLE_DDP_TEST_LAST_CALL";
/// The reaction to the loss of all ranks: `load` the checkpoint that rank 0 writes after each commit, or `end`.
pub(crate) const ALL_LOST: &str = "CANDLE_DDP_TEST_ALL_LOST";
/// The number of GPUs, if ranks train on these.
pub(crate) const GPUS: &str = "CANDLE_DDP_TEST_GPUS";
/// The epochs of a run that is killed at random times.
pub(crate) const LENGTH: &str = "CANDLE_DDP_TEST_EPOCHS";
/// How long each of its steps waits, in milliseconds.
pub(crate) const PAUSE: &str = "CANDLE_DDP_TEST_PAUSE";
pub(crate) const SAMPLES: usize = 50;
pub(crate) const BATCH: usize = 2;
pub(crate) const EPOCHS: u64 = 4;

pub(crate) fn net(vb: VarBuilder) -> candle_core::Result<Mlp> {
    Mlp::new([4, 8, 2], ["a", "b"], vb)
}

pub(crate) struct Training {
    varmap: VarMap,
    optimizer: AdamW,
    schedule: StepLr,
    noise: Generator,
    progress: LoaderState,
}

impl Parts for Training {
    fn parts(&mut self) -> Vec<(&str, &mut dyn StateDict)> {
        vec![
            ("model", &mut self.varmap),
            ("optimizer", &mut self.optimizer),
            ("schedule", &mut self.schedule),
            ("noise", &mut self.noise),
            ("progress", &mut self.progress),
        ]
    }
}

impl Training {
    pub(crate) fn new(rank: usize, device: &Device) -> Self {
        let varmap = variables(rank, device);
        let mut optimizer = AdamW::new(&varmap, ParamsAdamW { lr: 0.05, ..Default::default() }).unwrap();
        let schedule = StepLr::new(&mut optimizer, ParamsStepLr { step_size: 5, gamma: 0.7 }).unwrap();
        let progress = LoaderState { seed: 11, dataset_len: SAMPLES, ..Default::default() };
        Self { varmap, optimizer, schedule, noise: Generator::new(7), progress }
    }
}

/// Other initial values in every process but the first of rank 0: all have to get its state.
pub(crate) fn variables(rank: usize, device: &Device) -> VarMap {
    let varmap = VarMap::new();
    net(VarBuilder::from_varmap(&varmap, DType::F32, device)).unwrap();
    fill(&varmap, if rank == 0 && first_time("first", 0, 0) { 3 } else { u64::from(std::process::id()) });
    varmap
}

pub(crate) fn folder() -> PathBuf {
    std::env::var(FOLDER).unwrap().into()
}

/// Whether nothing of this name has happened yet, in any process of the test.
pub(crate) fn first_time(what: &str, rank: usize, commit: u64) -> bool {
    std::fs::File::create_new(folder().join(format!("{what}-{rank}-{commit}"))).is_ok()
}

/// Carries out the event that the test has planned here.
pub(crate) fn event(place: &str, rank: usize, commit: u64) -> Result<()> {
    let events = std::env::var(EVENTS).unwrap();
    for event in events.split(',').filter(|event| !event.is_empty()) {
        let [who, what, at] = event.split(' ').collect::<Vec<_>>()[..] else { panic!("{event}") };
        if who != rank.to_string() || at != commit.to_string() {
            continue;
        }
        let (what, here) = what.split_once('-').unwrap();
        if here != place || !first_time(event, rank, commit) {
            continue;
        }
        match what {
            "kill" => kill_process(getpid(), Signal::KILL).unwrap(),
            "join" => {
                // Ranks die together, when all with this event are at this place.
                for event in events.split(',').filter(|event| event.ends_with(&format!(" join-{place} {commit}"))) {
                    let other = event.split(' ').next().unwrap();
                    let name = format!("{event}-{other}-{commit}");
                    while !folder().join(&name).exists() {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
                kill_process(getpid(), Signal::KILL).unwrap();
            }
            "exit" => std::process::exit(0),
            "wait" => wait_for(&format!("go-{commit}"), || folder().join(format!("go-{commit}")).exists()),
            "panic" => panic!("out of luck"),
            "error" => return Err(Error::InvalidArgument { argument: "luck", reason: "it has run out".to_string() }),
            other => panic!("{other}"),
        }
    }
    Ok(())
}

pub(crate) fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |number| number.parse().unwrap())
}

pub(crate) fn all_lost(what: &str) -> bool {
    std::env::var(ALL_LOST).is_ok_and(|all_lost| all_lost == what)
}

pub(crate) fn append(name: &str, line: &str) {
    use std::io::Write;
    let mut file = std::fs::File::options().create(true).append(true).open(folder().join(name)).unwrap();
    writeln!(file, "{line}").unwrap();
}

pub(crate) fn train(pg: &ProcessGroup, state: &mut State<Training>, own: usize) -> Result<Vec<f32>> {
    event("begin", own, state.commits())?;
    append(&format!("entered-{own}"), &format!("{} {}", std::process::id(), resources()));
    let ddp = DistributedDataParallel::new(pg, &state.varmap, |vb| net(vb))?;
    let data = tensor(&[SAMPLES, 4], 1).to_device(pg.device())?;
    while state.progress.epoch < EPOCHS {
        let mine: Vec<usize> = state.progress.indices(pg.rank(), pg.world_size())?.take(BATCH).collect();
        let rows: Vec<Tensor> = mine.iter().map(|index| data.i(*index)).collect::<candle_core::Result<_>>()?;
        let noise = state.noise.randn(0., 0.01, (1, 4), DType::F32, pg.device())?;
        let loss = ddp.forward(&Tensor::stack(&rows, 0)?.broadcast_add(&noise)?)?.sqr()?.mean_all()?;
        let samples: Vec<String> = mine.iter().map(usize::to_string).collect();
        let (commit, world_size, epoch) = (state.commits(), pg.world_size(), state.progress.epoch);
        append(&format!("seen-{own}"), &format!("{commit} {world_size} {epoch} {}", samples.join(" ")));
        event("forward", own, state.commits())?;
        let grads = ddp.backward(&loss)?;
        event("backward", own, state.commits())?;
        let Training { optimizer, schedule, progress, .. } = &mut **state;
        optimizer.step(&grads)?;
        schedule.step(optimizer)?;
        progress.advance(mine.len() * pg.world_size());
        event("step", own, state.commits())?;
        state.commit()?;
        if pg.rank() == 0 && all_lost("load") {
            state.save(folder().join("checkpoint"))?;
        }
        event("commit", own, state.commits())?;
    }
    event("end", own, 0)?;
    Ok(ddp.parameters().iter().flat_map(|var| floats(var)).collect())
}

/// The numbers of threads and open files of this process.
fn resources() -> String {
    let count = |folder: &str| std::fs::read_dir(folder).unwrap().count();
    format!("{} {}", count("/proc/self/task"), count("/proc/self/fd"))
}

/// The device on which this rank trains.
fn device() -> Device {
    let number = |name| -> Option<usize> { std::env::var(name).ok()?.parse().ok() };
    match (number(GPUS), number("LOCAL_RANK").or_else(|| number("SLURM_LOCALID"))) {
        (Some(gpus), local_rank) => Device::new_cuda(local_rank.unwrap() % gpus).unwrap(),
        (None, _) => Device::Cpu,
    }
}

/// Runs a rank, and reports its final parameters, or its error.
pub(crate) fn run_as_rank<S: Parts>(
    new: impl Fn(usize, &Device) -> State<S>,
    train: impl Fn(&ProcessGroup, &mut State<S>, usize) -> Result<Vec<f32>>,
) {
    run_with(InitOptions::default(), new, train);
}

/// The same with further options.
pub(crate) fn run_with<S: Parts>(
    init: InitOptions,
    new: impl Fn(usize, &Device) -> State<S>,
    train: impl Fn(&ProcessGroup, &mut State<S>, usize) -> Result<Vec<f32>>,
) {
    let own: usize = std::env::var("RANK").or_else(|_| std::env::var("SLURM_PROCID")).unwrap().parse().unwrap();
    if std::env::var(EVENTS).unwrap().contains("error-") {
        // ddprun asks the others to exit a second after a failure. On a busy machine, they need longer for their errors.
        signal_hook::flag::register(signal_hook::consts::SIGTERM, Arc::default()).unwrap();
    }
    event("start", own, 0).unwrap();
    let min_world_size = std::env::var(MIN).ok().map(|min| min.parse().unwrap());
    let init_method = std::env::var("INIT_METHOD").unwrap_or_else(|_| "env://".to_string());
    let last_call = std::env::var(LAST_CALL).map_or(10, |seconds| seconds.parse().unwrap());
    let (timeout, device) = (Duration::from_secs(12 * last_call), device());
    let init = InitOptions { init_method, timeout, device: Some(device.clone()), ..init };
    let last_call_timeout = Duration::from_secs(last_call);
    let options = ElasticOptions { init, min_world_size, last_call_timeout, start_over: !all_lost("end") };
    let mut state = new(own, &device);
    if all_lost("load") {
        state = state.on_total_loss(|state, _| match folder().join("checkpoint") {
            path if path.exists() => state.load(path).map(|()| true),
            _ => Ok(false),
        });
    }
    match elastic::run(options, &mut state, |pg, state| train(pg, state, own)) {
        Ok(weights) => write_result(own, &weights),
        Err(error) => {
            append(&format!("error-{own}"), &error.to_string());
            eprintln!("Error: {error}");
            std::process::exit(1);
        }
    }
}

pub(crate) fn write_result(own: usize, weights: &[f32]) {
    let text: Vec<String> = weights.iter().map(f32::to_string).collect();
    std::fs::write(folder().join(format!("result-{own}")), text.join(" ")).unwrap();
}

/// How the test binary runs nothing but the entry point `test`.
pub(crate) fn arguments(test: &str) -> [&str; 5] {
    [test, "--exact", "--include-ignored", "--nocapture", "--test-threads=1"]
}

pub(crate) struct Run {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) output: Output,
}

impl Run {
    /// Under ddprun, with the entry point `test`.
    pub(crate) fn of(test: &str, world_size: usize, options: &[&str], events: &str, min: Option<usize>) -> Self {
        Self::with(test, world_size, options, events, min.map(|min| (MIN, min.to_string())))
    }

    /// Under ddprun, with more variables.
    pub(crate) fn with<'a>(
        test: &str,
        world_size: usize,
        options: &[&str],
        events: &str,
        variables: impl IntoIterator<Item = (&'a str, String)>,
    ) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut launcher = Command::new(crate::common::ddprun());
        launcher.args(["--nproc-per-node", &world_size.to_string()]).args(options);
        launcher.arg(std::env::current_exe().unwrap()).args(arguments(test));
        launcher.env(EVENTS, events).env(FOLDER, folder.path()).envs(variables);
        Self { output: launcher.output().unwrap(), folder }
    }

    pub(crate) fn read(&self, name: &str) -> String {
        read(self.folder.path(), name)
    }

    pub(crate) fn stderr(&self) -> String {
        String::from_utf8_lossy(&self.output.stderr).into_owned()
    }

    #[track_caller]
    pub(crate) fn succeeded(&self) {
        assert!(self.output.status.success(), "{}\n{}", String::from_utf8_lossy(&self.output.stdout), self.stderr());
    }

    pub(crate) fn processes(&self, rank: usize) -> Vec<String> {
        processes(self.folder.path(), rank)
    }
}

/// The processes of a rank, in the order of the times at which they began to train.
pub(crate) fn processes(folder: &Path, rank: usize) -> Vec<String> {
    let entered = read(folder, &format!("entered-{rank}"));
    entered.lines().map(|line| line.split(' ').next().unwrap().to_string()).collect()
}

/// Ranks with the entry point `test`, without a launcher that hosts the store.
pub(crate) fn by_hand(
    test: &str,
    folder: &Path,
    init_method: &str,
    world_size: usize,
    events: &str,
    min: usize,
) -> Vec<Command> {
    let rank = |rank: usize| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(arguments(test)).env(EVENTS, events).env(FOLDER, folder).env(MIN, min.to_string());
        command.env("INIT_METHOD", init_method).env("RAYON_NUM_THREADS", "1");
        command.env("SLURM_PROCID", rank.to_string()).env("SLURM_NTASKS", world_size.to_string());
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command
    };
    (0..world_size).map(rank).collect()
}

pub(crate) fn read(folder: &Path, name: &str) -> String {
    std::fs::read_to_string(folder.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The final parameters, which are the same on all ranks.
pub(crate) fn result(folder: &Path, ranks: &[usize]) -> String {
    let all: Vec<String> = ranks.iter().map(|rank| read(folder, &format!("result-{rank}"))).collect();
    assert!(all.iter().all(|other| *other == all[0]), "{all:?}");
    all[0].clone()
}

#[track_caller]
pub(crate) fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(120), "timed out waiting for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
