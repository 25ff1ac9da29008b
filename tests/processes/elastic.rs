//! `elastic::run` with real processes that are killed: under the launcher, and by hand.
//!
//! The processes are this test binary itself; environment variables make it a rank, and say when it kills itself.
use crate::common::{fill, floats, tensor};
use candle_core::{DType, Device, IndexOp, Module, Tensor};
use candle_ddp::elastic::{self, ElasticOptions, Parts, Progress, State};
use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW, ParamsStepLr, StateDict, StepLr};
use candle_ddp::rendezvous::Store;
use candle_ddp::seed::Generator;
use candle_ddp::{DdpOptions, DistributedDataParallel, Error, InitOptions, ProcessGroup, Result};
use candle_nn::{Linear, VarBuilder, VarMap, linear};
use rustix::process::{Signal, getpid, kill_process};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// What happens to ranks, as a list of `RANK WHERE COMMIT`: the folder of the test remembers what has happened.
pub(crate) const EVENTS: &str = "CANDLE_DDP_TEST_ELASTIC";
pub(crate) const FOLDER: &str = "CANDLE_DDP_TEST_FOLDER";
const MIN: &str = "CANDLE_DDP_TEST_MIN";
pub(crate) const SAMPLES: usize = 50;
pub(crate) const BATCH: usize = 2;
const EPOCHS: usize = 4;

pub(crate) struct Net(Linear, Linear);

impl Net {
    pub(crate) fn new(vb: VarBuilder) -> candle_core::Result<Self> {
        Ok(Self(linear(4, 8, vb.pp("a"))?, linear(8, 2, vb.pp("b"))?))
    }
}

impl Module for Net {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.1.forward(&self.0.forward(x)?.tanh()?)
    }
}

struct Training {
    varmap: VarMap,
    optimizer: AdamW,
    schedule: StepLr,
    noise: Generator,
    progress: Progress,
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
    fn new(rank: usize) -> Self {
        let varmap = variables(rank);
        let vars = varmap.data().lock().unwrap();
        let mut named: Vec<_> = vars.iter().map(|(name, var)| (name.clone(), var.clone())).collect();
        drop(vars);
        named.sort_by(|(name, _), (other, _)| name.cmp(other));
        let mut optimizer = AdamW::from_named(named, ParamsAdamW { lr: 0.05, ..Default::default() }).unwrap();
        let schedule = StepLr::new(&mut optimizer, ParamsStepLr { step_size: 5, gamma: 0.7 }).unwrap();
        Self { varmap, optimizer, schedule, noise: Generator::new(7), progress: Progress::default() }
    }
}

/// Other initial values in every process but the first of rank 0: all have to get its state.
pub(crate) fn variables(rank: usize) -> VarMap {
    let varmap = VarMap::new();
    Net::new(VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu)).unwrap();
    fill(&varmap, if rank == 0 && first_time("first", 0, 0) { 3 } else { u64::from(std::process::id()) });
    varmap
}

pub(crate) fn folder() -> PathBuf {
    std::env::var(FOLDER).unwrap().into()
}

/// Whether nothing of this name has happened yet, in any process of the test.
fn first_time(what: &str, rank: usize, commit: u64) -> bool {
    std::fs::File::create_new(folder().join(format!("{what}-{rank}-{commit}"))).is_ok()
}

/// Does what the test wants to happen here.
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
                // Ranks 1 and 2 die together, when both are at this place.
                let other = if rank == 1 { 2 } else { 1 };
                let name = format!("{other} join-{place} {commit}-{other}-{commit}");
                while !folder().join(&name).exists() {
                    std::thread::sleep(Duration::from_millis(1));
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

fn append(name: &str, line: &str) {
    use std::io::Write;
    let mut file = std::fs::File::options().create(true).append(true).open(folder().join(name)).unwrap();
    writeln!(file, "{line}").unwrap();
}

fn train(pg: &ProcessGroup, state: &mut State<Training>, own: usize) -> Result<Vec<f32>> {
    event("begin", own, state.commits())?;
    append(&format!("entered-{own}"), &format!("{} {}", std::process::id(), resources()));
    let ddp = DistributedDataParallel::new(pg, &state.varmap, DType::F32, |vb| Net::new(vb), DdpOptions::default())?;
    let data = tensor(&[SAMPLES, 4], 1);
    while state.progress.epoch < EPOCHS {
        let mine: Vec<usize> = state.progress.indices(SAMPLES, 11, pg.rank(), pg.world_size())?.take(BATCH).collect();
        let rows: Vec<Tensor> = mine.iter().map(|index| data.i(*index)).collect::<candle_core::Result<_>>()?;
        let noise = state.noise.randn(0., 0.01, (1, 4), DType::F32, &Device::Cpu)?;
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
        progress.advance(mine.len() * pg.world_size(), SAMPLES);
        event("step", own, state.commits())?;
        state.commit()?;
        event("commit", own, state.commits())?;
    }
    event("end", own, 0)?;
    Ok(ddp.parameters().iter().flat_map(|var| floats(var)).collect())
}

/// How many threads, and open files, this process has.
fn resources() -> String {
    let count = |folder: &str| std::fs::read_dir(folder).unwrap().count();
    format!("{} {}", count("/proc/self/task"), count("/proc/self/fd"))
}

/// The entry point of ranks: libtest runs it in every process, and it does nothing in the test's own.
#[test]
fn rank_of_another_test() {
    if std::env::var(EVENTS).is_ok() {
        run_as_rank(|own| State::new(Training::new(own)), train);
    }
}

/// Runs a rank, and reports its final parameters, or its error.
pub(crate) fn run_as_rank<S: Parts>(
    new: impl Fn(usize) -> State<S>,
    train: impl Fn(&ProcessGroup, &mut State<S>, usize) -> Result<Vec<f32>>,
) {
    let own: usize = std::env::var("RANK").or_else(|_| std::env::var("SLURM_PROCID")).unwrap().parse().unwrap();
    event("start", own, 0).unwrap();
    let min_world_size = std::env::var(MIN).ok().map(|min| min.parse().unwrap());
    let init_method = std::env::var("INIT_METHOD").unwrap_or_else(|_| "env://".to_string());
    let init = InitOptions { init_method, timeout: Duration::from_secs(60), ..Default::default() };
    let options = ElasticOptions { init, min_world_size, last_call_timeout: Duration::from_secs(10) };
    match elastic::run(options, &mut new(own), |pg, state| train(pg, state, own)) {
        Ok(weights) => {
            let text: Vec<String> = weights.iter().map(f32::to_string).collect();
            std::fs::write(folder().join(format!("result-{own}")), text.join(" ")).unwrap();
        }
        Err(error) => {
            append(&format!("error-{own}"), &error.to_string());
            eprintln!("Error: {error}");
            std::process::exit(1);
        }
    }
}

/// How the test binary runs nothing but the entry point `test`.
pub(crate) fn arguments(test: &str) -> [&str; 4] {
    [test, "--exact", "--nocapture", "--test-threads=1"]
}

pub(crate) const RANK: &str = "elastic::rank_of_another_test";

pub(crate) struct Run {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) output: Output,
}

impl Run {
    /// Under ddprun.
    fn launched(world_size: usize, options: &[&str], events: &str, min: Option<usize>) -> Self {
        Self::of(RANK, world_size, options, events, min)
    }

    /// Under ddprun, with the entry point `test`.
    pub(crate) fn of(test: &str, world_size: usize, options: &[&str], events: &str, min: Option<usize>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut launcher = Command::new(env!("CARGO_BIN_EXE_ddprun"));
        launcher.args(["--nproc-per-node", &world_size.to_string()]).args(options);
        launcher.arg(std::env::current_exe().unwrap()).args(arguments(test));
        launcher.env(EVENTS, events).env(FOLDER, folder.path()).envs(min.map(|min| (MIN, min.to_string())));
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

    /// The processes of a rank, in the order of the times at which they began to train.
    fn processes(&self, rank: usize) -> Vec<String> {
        let entered = self.read(&format!("entered-{rank}"));
        entered.lines().map(|line| line.split(' ').next().unwrap().to_string()).collect()
    }
}

/// Starts a ddprun that is one of one or two nodes with two ranks each, and waits until the store has `key`.
fn node(folder: &Path, port: u16, events: &str, key: &str) -> Child {
    let mut launcher = Command::new(env!("CARGO_BIN_EXE_ddprun"));
    launcher.args(["--nnodes=1:2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-id=elastic"]);
    launcher.arg(format!("--rdzv-endpoint=localhost:{port}"));
    launcher.arg("--rdzv-conf=keep_alive_interval=0.1,keep_alive_max_attempt=40");
    launcher.arg(std::env::current_exe().unwrap()).args(arguments(RANK));
    launcher.env(EVENTS, events).env(FOLDER, folder).stdout(Stdio::null()).stderr(Stdio::piped());
    let child = launcher.spawn().unwrap();
    // The first node hosts the store.
    let store = candle_ddp::rendezvous::TcpStore::connect("localhost", port, Duration::from_secs(60)).unwrap();
    store.wait(&[key], None).unwrap();
    child
}

#[track_caller]
pub(crate) fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(120), "timed out waiting for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_whole_node_dies_and_another_comes_while_survivors_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let (folder, port) = (folder.path(), crate::common::free_port());
    let events = "0 wait-forward 3,0 wait-forward 6";
    // Who comes first is given the first ranks.
    let first = node(folder, port, events, "candle_ddp/nodes/welcome/0");
    let mut second = node(folder, port, events, "candle_ddp/nodes/welcome/1");
    let entered = |rank: usize| {
        std::fs::read_to_string(folder.join(format!("entered-{rank}"))).map_or(0, |text| text.lines().count())
    };
    let waits = |commit: usize| folder.join(format!("0 wait-forward {commit}-0-{commit}")).exists();
    wait_for("the first steps of four ranks", || waits(3));
    assert_eq!(entered(2), 1);
    second.kill().unwrap();
    second.wait().unwrap();
    std::fs::write(folder.join("go-3"), "").unwrap();
    wait_for("steps without the second node", || waits(6));
    assert_eq!((entered(0), entered(2)), (2, 1));
    // It is admitted by a generation of its own.
    let third = node(folder, port, events, "candle_ddp/agent/0/generation/2");
    std::fs::write(folder.join("go-6"), "").unwrap();
    let outputs = [first, third].map(|node| node.wait_with_output().unwrap());
    for output in &outputs {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    result(folder, &[0, 1, 2, 3]);
    let run = Run { output: outputs[0].clone(), folder: tempfile::tempdir().unwrap() };
    let processes = |rank: usize| -> Vec<String> {
        let entered = read(folder, &format!("entered-{rank}"));
        entered.lines().map(|line| line.split(' ').next().unwrap().to_string()).collect()
    };
    for survivor in [processes(0), processes(1)] {
        assert!(survivor.len() == 3 && survivor.iter().all(|process| *process == survivor[0]), "{survivor:?}");
    }
    let replaced = processes(2);
    assert!(replaced.len() == 2 && replaced[0] != replaced[1], "{replaced:?}");
    assert!(run.stderr().contains("The other 2 rank(s) go on without it"), "{}", run.stderr());
    assert!(run.stderr().contains("the others go on with it, 4 ranks in all"), "{}", run.stderr());
}

/// The processes of a rank are replaced on the node where they were, while all others go on.
#[test]
fn a_rank_of_another_node_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let port = crate::common::free_port().to_string();
    let start = |node_rank: &str| {
        let mut launcher = Command::new(env!("CARGO_BIN_EXE_ddprun"));
        launcher.args(["--nnodes=2", "--nproc-per-node=2", "--max-restarts=2", "--master-addr=127.0.0.1"]);
        launcher.args(["--node-rank", node_rank, "--master-port", &port]);
        launcher.arg(std::env::current_exe().unwrap()).args(arguments(RANK));
        launcher.env(EVENTS, "3 kill-forward 2,0 kill-backward 5").env(FOLDER, folder.path());
        launcher.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let outputs = [start("0"), start("1")].map(|node| node.wait_with_output().unwrap());
    for output in &outputs {
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{stderr}");
        assert!(stderr.contains("it is started again, and the others go on (restart 2 of 2)"), "{stderr}");
    }
    result(folder.path(), &[0, 1, 2, 3]);
    let survivor: Vec<String> =
        read(folder.path(), "entered-1").lines().map(|line| line.split(' ').next().unwrap().to_string()).collect();
    assert!(survivor.len() == 3 && survivor.iter().all(|process| *process == survivor[0]), "{survivor:?}");
}

fn read(folder: &Path, name: &str) -> String {
    std::fs::read_to_string(folder.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The final parameters, which are the same on all ranks.
pub(crate) fn result(folder: &Path, ranks: &[usize]) -> String {
    let all: Vec<String> = ranks.iter().map(|rank| read(folder, &format!("result-{rank}"))).collect();
    assert!(all.iter().all(|other| *other == all[0]), "{all:?}");
    all[0].clone()
}

#[test]
fn with_every_rank_killed_and_replaced_the_result_is_that_of_an_undisturbed_run() {
    let calm = Run::launched(3, &[], "", None);
    calm.succeeded();
    // At each place of a step: the others are in the middle of it, or a commit ahead.
    let events = "1 kill-forward 3,0 kill-backward 5,2 kill-step 8,1 kill-commit 9,0 kill-begin 9,2 kill-forward 14,0 kill-end 0";
    let run = Run::launched(3, &["--max-restarts", "7"], events, None);
    run.succeeded();
    assert_eq!(result(run.folder.path(), &[0, 1, 2]), result(calm.folder.path(), &[0, 1, 2]));
    assert!(run.stderr().contains("the others go on (restart 7 of 7)"), "{}", run.stderr());
}

#[test]
fn survivors_keep_their_process_and_nothing_piles_up() {
    let kills: Vec<String> = (1..=8).map(|commit| format!("1 kill-forward {}", 2 * commit)).collect();
    let run = Run::launched(2, &["--max-restarts", "8"], &kills.join(","), None);
    run.succeeded();
    let (survivor, replaced) = (run.processes(0), run.processes(1));
    assert_eq!((survivor.len(), replaced.len()), (9, 9));
    assert!(survivor.iter().all(|process| *process == survivor[0]), "{survivor:?}");
    assert!((1..9).all(|index| replaced[index] != replaced[index - 1]), "{replaced:?}");
    // Threads and open files of the survivor, at the beginning of each generation.
    let entered = run.read("entered-0");
    let resources: Vec<Vec<usize>> =
        entered.lines().map(|line| line.split(' ').skip(1).map(|count| count.parse().unwrap()).collect()).collect();
    // The second one has what was made once, such as the threads that compute.
    assert_eq!(resources[8], resources[1], "{resources:?}");
}

#[test]
fn a_replacement_that_dies_at_once_is_replaced_as_well() {
    let events = "1 kill-forward 3,1 kill-start 0,0 kill-forward 6";
    let run = Run::launched(2, &["--max-restarts", "3"], events, None);
    // The first process of rank 1 dies before any rank is known to be elastic, or after.
    run.succeeded();
    assert_eq!(run.processes(0).len() + run.processes(1).len(), 6, "{}", run.stderr());
}

#[test]
fn without_restarts_the_others_go_on_down_to_the_smallest_world_size() {
    let run = Run::launched(4, &[], "2 kill-forward 1,0 kill-backward 4", Some(2));
    run.succeeded();
    result(run.folder.path(), &[1, 3]);
    assert!(run.stderr().contains("the other 2 rank(s) go on without it"), "{}", run.stderr());
    let run = Run::launched(3, &["--max-restarts", "1"], "1 kill-forward 1,2 kill-forward 2,0 kill-forward 3", Some(2));
    assert_eq!(run.output.status.code(), Some(128 + 9), "{}", run.stderr());
    let expected = "rank 0 ended the group: its process was killed by SIGKILL, all restarts are used up \
                    (--max-restarts 1), and the 1 rank(s) that are left are fewer than min_world_size (2)";
    assert!(run.read("error-1").contains(expected), "{}", run.read("error-1"));
}

#[test]
fn an_error_of_the_program_is_not_retried() {
    for (event, expected) in
        [("1 error-forward 2", "luck: it has run out"), ("1 panic-backward 2", "it panicked: out of luck")]
    {
        let run = Run::launched(3, &["--max-restarts", "5"], event, Some(1));
        assert!(!run.output.status.success());
        for rank in [0, 2] {
            let error = run.read(&format!("error-{rank}"));
            assert!(error.contains(&format!("rank 1 ended the group: {expected}")), "{error}");
            assert_eq!(run.processes(rank).len(), 1);
        }
        assert!(!run.stderr().contains("restart"), "{}", run.stderr());
    }
    let run = Run::launched(2, &["--max-restarts", "5"], "1 exit-forward 2", Some(1));
    assert!(!run.output.status.success());
    assert!(run.read("error-0").contains("exited with code 0 before all ranks had finished"), "{}", run.stderr());
}

/// Starts ranks without a launcher that hosts the store.
fn by_hand(folder: &Path, init_method: &str, world_size: usize, events: &str, min: usize) -> Vec<Child> {
    let start = |rank: usize| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(arguments(RANK)).env(EVENTS, events).env(FOLDER, folder).env(MIN, min.to_string());
        command.env("INIT_METHOD", init_method).env("RAYON_NUM_THREADS", "1");
        command.env("SLURM_PROCID", rank.to_string()).env("SLURM_NTASKS", world_size.to_string());
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    };
    (0..world_size).map(start).collect()
}

#[test]
fn under_slurm_the_ranks_that_are_left_see_every_sample() {
    let folder = tempfile::tempdir().unwrap();
    let init_method = format!("file://{}", folder.path().join("store").display());
    let mut ranks = by_hand(folder.path(), &init_method, 4, "0 kill-forward 2,2 kill-backward 5", 2);
    let codes: Vec<bool> = ranks.iter_mut().map(|rank| rank.wait().unwrap().success()).collect();
    assert_eq!(codes, [false, true, false, true]);
    result(folder.path(), &[1, 3]);
    // A step that was begun with more ranks, and again with fewer, counts once.
    let mut steps = std::collections::BTreeMap::<usize, (usize, Vec<(usize, Vec<usize>)>)>::new();
    for line in (0..4).map(|rank| read(folder.path(), &format!("seen-{rank}"))).collect::<String>().lines() {
        let numbers: Vec<usize> = line.split(' ').map(|number| number.parse().unwrap()).collect();
        let step = steps.entry(numbers[0]).or_insert((numbers[1], Vec::new()));
        if numbers[1] < step.0 {
            *step = (numbers[1], Vec::new());
        }
        if numbers[1] == step.0 {
            step.1.push((numbers[2], numbers[3..].to_vec()));
        }
    }
    let mut seen = vec![vec![0; SAMPLES]; EPOCHS];
    for (epoch, samples) in steps.into_values().flat_map(|(_, ranks)| ranks) {
        samples.into_iter().for_each(|sample| seen[epoch][sample] += 1);
    }
    assert!(seen.iter().flatten().all(|count| *count >= 1), "{seen:?}");
    // Only what pads an epoch is seen twice.
    let twice: Vec<usize> = seen.iter().map(|epoch| epoch.iter().sum::<usize>() - SAMPLES).collect();
    assert!(twice.iter().all(|count| *count <= 3), "{twice:?}");
}

#[test]
fn the_end_of_the_store_and_too_few_ranks_are_errors_that_say_so() {
    for (events, min, expected) in [
        ("1 kill-forward 2", 3, "fewer than min_world_size (3)"),
        ("0 kill-forward 2", 1, "the process that hosts it (rank 0, or the launcher) has ended"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let init_method = format!("tcp://127.0.0.1:{}", crate::common::free_port());
        let start = Instant::now();
        for mut rank in by_hand(folder.path(), &init_method, 3, events, min) {
            assert!(!rank.wait().unwrap().success());
        }
        assert!(start.elapsed() < Duration::from_secs(50), "{:?}", start.elapsed());
        for rank in (0..3).filter(|rank| !events.starts_with(&rank.to_string())) {
            let error = read(folder.path(), &format!("error-{rank}"));
            assert!(error.contains(expected) && error.contains("is gone: its connection to rank"), "{error}");
        }
    }
}

/// As torchrun does it: its agent hosts the store, and starts all workers again.
#[test]
fn where_all_ranks_are_started_again_the_error_of_the_group_is_returned() {
    let run = Run::launched(2, &["--nnodes", "1", "--max-restarts", "0"], "1 kill-forward 2", None);
    assert!(run.read("error-0").contains("--max-restarts 0"), "{}", run.stderr());
    let folder = tempfile::tempdir().unwrap();
    let mut launcher = Command::new(env!("CARGO_BIN_EXE_ddprun"));
    launcher.args(["--nproc-per-node", "2", "--max-restarts", "0", "env", "-u", "CANDLE_DDP_AGENT"]);
    launcher.arg(std::env::current_exe().unwrap()).args(arguments(RANK));
    launcher.env(EVENTS, "1 kill-forward 2").env(FOLDER, folder.path());
    assert!(!launcher.output().unwrap().status.success());
    assert!(read(folder.path(), "error-0").starts_with("rank 1 is gone: "));
}
