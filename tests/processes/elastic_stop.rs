//! Elastic runs that a signal ends while ranks are killed: the others save a last checkpoint and end with 0, or get an error at
//! once. None waits until `ddprun` kills it.
use crate::common::elastic_ranks::wait_for;
use crate::common::{going_on, launch_nodes, values};
use candle_core::{DType, Device, Tensor};
use candle_ddp::checkpoint::{Parts, StateDict};
use candle_ddp::elastic::{self, ElasticOptions, State};
use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW};
use candle_ddp::{DistributedDataParallel, InitOptions, ProcessGroup, Result, StopSignals};
use candle_nn::{VarBuilder, VarMap, linear};
use rustix::process::{Pid, Signal, kill_process};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const FOLDER: &str = "CANDLE_DDP_TEST_STOP_FOLDER";
const MIN: &str = "CANDLE_DDP_TEST_STOP_MIN";
/// The number of runs with a death at a random time.
const RUNS: &str = "CANDLE_DDP_TEST_STOP_RUNS";
/// Far longer than a run takes to stop. Only a rank that is left without a decision waits so long.
const SHUTDOWN: Duration = Duration::from_secs(90);

/// The entry point of ranks.
#[test]
#[ignore = "started by other tests"]
fn rank_of_another_test() {
    let folder = PathBuf::from(std::env::var_os(FOLDER).unwrap());
    let own: usize = std::env::var("RANK").unwrap().parse().unwrap();
    let stop_signals = StopSignals { sigterm: true, ..Default::default() };
    let init = InitOptions { stop_signals, timeout: Duration::from_secs(300), ..Default::default() };
    let min_world_size = std::env::var(MIN).ok().map(|min| min.parse().unwrap());
    let mut state = State::new(Training::new());
    let options = ElasticOptions { init, min_world_size, ..Default::default() };
    match elastic::run(options, &mut state, |pg, state| train(pg, state, &folder, own)) {
        Ok(step) => note(&folder, &format!("ended{own}"), &step.to_string()),
        Err(error) => {
            note(&folder, &format!("error{own}"), &error.to_string());
            std::process::exit(1);
        }
    }
}

/// Writes a file as a whole.
fn note(folder: &Path, name: &str, text: &str) {
    let new = folder.join(format!("{name}.new{}", std::process::id()));
    std::fs::write(&new, text).unwrap();
    std::fs::rename(new, folder.join(name)).unwrap();
}

/// A part that takes its time to be saved, and says when. It is held up while the file `hold` exists.
struct Slow(PathBuf);

impl StateDict for Slow {
    fn state_dict(&self) -> Result<HashMap<String, Tensor>> {
        note(&self.0, "saving", "");
        let begin = Instant::now();
        while self.0.join("hold").exists() && begin.elapsed() < SHUTDOWN / 2 {
            pause(1);
        }
        pause(20);
        Ok(HashMap::from([("none".to_string(), Tensor::zeros(1, DType::F32, &Device::Cpu)?)]))
    }

    fn load_state_dict(&mut self, _: &HashMap<String, Tensor>) -> Result<()> {
        Ok(())
    }
}

struct Training {
    varmap: VarMap,
    optimizer: AdamW,
    step: u64,
}

impl Training {
    fn new() -> Self {
        let varmap = VarMap::new();
        linear(4, 2, VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu)).unwrap();
        let optimizer = AdamW::new(&varmap, ParamsAdamW::default()).unwrap();
        Self { varmap, optimizer, step: 0 }
    }
}

impl Parts for Training {
    fn parts(&mut self) -> Vec<(&str, &mut dyn StateDict)> {
        vec![("model", &mut self.varmap), ("optimizer", &mut self.optimizer), ("step", &mut self.step)]
    }
}

/// The parts that are saved.
struct Saved<'a>(&'a mut Training, Slow);

impl Parts for Saved<'_> {
    fn parts(&mut self) -> Vec<(&str, &mut dyn StateDict)> {
        let mut parts = self.0.parts();
        parts.push(("slow", &mut self.1));
        parts
    }
}

/// Trains until the ranks are asked to stop, and returns the last step, which is saved.
fn train(pg: &ProcessGroup, state: &mut State<Training>, folder: &Path, own: usize) -> Result<u64> {
    let ddp = DistributedDataParallel::new(pg, &state.varmap, |vb| linear(4, 2, vb))?;
    // The ranks of the last generation may have saved before it ended.
    let mut checkpointer = going_on(pg, folder.join("run"))?;
    let x = Tensor::from_vec(values(8, 1), (2, 4), pg.device())?;
    for here in 1.. {
        let grads = ddp.backward(&ddp.forward(&x)?.sqr()?.mean_all()?)?;
        let Training { optimizer, step, .. } = &mut **state;
        optimizer.step(&grads)?;
        *step += 1;
        state.commit()?;
        if pg.stop_requested()? {
            break;
        }
        if here == 3 {
            note(folder, &format!("up{own}"), &std::process::id().to_string());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let step = state.step;
    checkpointer.save(step, &mut Saved(state, Slow(folder.to_path_buf())))?;
    checkpointer.finish()?;
    Ok(step)
}

/// Runs under one `ddprun` for each node.
struct Run {
    folder: tempfile::TempDir,
    launchers: Vec<Child>,
    world_size: usize,
}

impl Run {
    /// Starts `nodes` launchers of `workers` ranks each, and waits until all train.
    fn start(nodes: usize, workers: usize, min: Option<usize>, options: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let shutdown = SHUTDOWN.as_secs().to_string();
        let options = [&["--shutdown-timeout", &shutdown], options].concat();
        let start = |mut launcher: Command| {
            launcher.env(FOLDER, folder.path()).env("RAYON_NUM_THREADS", "1");
            launcher.envs(min.map(|min| (MIN, min.to_string())));
            launcher.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let launchers = launch_nodes(module_path!(), nodes, workers, &options).into_iter().map(start).collect();
        let run = Self { folder, launchers, world_size: nodes * workers };
        wait_for("the first steps of all ranks", || (0..run.world_size).all(|rank| run.pid(rank).is_some()));
        run
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn read(&self, name: &str) -> Option<String> {
        std::fs::read_to_string(self.path(name)).ok()
    }

    /// The newest process of a rank that has trained.
    fn pid(&self, rank: usize) -> Option<Pid> {
        Pid::from_raw(self.read(&format!("up{rank}"))?.parse().ok()?)
    }

    /// Sends the signal to the launcher of a node, kills these ranks while others are in their last save, and lets the save
    /// continue.
    fn stop_and_kill_in_the_save(&self, node: usize, gone: &[usize]) {
        note(self.folder.path(), "hold", "");
        self.stop(node);
        wait_for("the save", || self.path("saving").exists());
        gone.iter().for_each(|rank| self.kill(*rank));
        std::fs::remove_file(self.path("hold")).unwrap();
    }

    fn kill(&self, rank: usize) {
        // It may have ended.
        let _ = kill_process(self.pid(rank).unwrap(), Signal::KILL);
    }

    fn stop(&self, node: usize) {
        kill_process(Pid::from_child(&self.launchers[node]), Signal::TERM).unwrap();
    }

    /// Waits for the launchers. No worker may have waited until it was killed.
    #[track_caller]
    fn end(&mut self) -> Vec<Output> {
        let begin = Instant::now();
        let launchers = std::mem::take(&mut self.launchers);
        let outputs: Vec<Output> = std::thread::scope(|scope| {
            let wait = |launcher: Child| scope.spawn(|| launcher.wait_with_output().unwrap());
            let threads: Vec<_> = launchers.into_iter().map(wait).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(begin.elapsed() < SHUTDOWN, "workers were killed: {:?}, {}", self.errors(), texts(&outputs));
        outputs
    }

    /// Asserts that the ranks other than `gone` have ended after the same step, and that its checkpoint is complete.
    #[track_caller]
    fn saved(&self, gone: &[usize], outputs: &[Output]) {
        let text = texts(outputs);
        let ended = |rank: &usize| self.read(&format!("ended{rank}"));
        let steps: Vec<_> = (0..self.world_size).filter(|rank| !gone.contains(rank)).map(|rank| ended(&rank)).collect();
        let step = steps[0].clone().unwrap_or_else(|| panic!("{steps:?}, {:?}: {text}", self.errors()));
        assert!(steps.iter().all(|other| other.as_ref() == Some(&step)), "{steps:?}: {:?}, {text}", self.errors());
        let newest = self.path(&format!("run/step-{:08}/checkpoint.json", step.parse::<u64>().unwrap()));
        assert!(newest.exists(), "no {}: {text}", newest.display());
    }

    fn errors(&self) -> Vec<String> {
        (0..self.world_size).filter_map(|rank| self.read(&format!("error{rank}"))).collect()
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        // Only after a failure is any left.
        for launcher in &mut self.launchers {
            let _ = launcher.kill();
            let _ = launcher.wait();
        }
    }
}

fn texts(outputs: &[Output]) -> String {
    outputs.iter().map(|output| String::from_utf8_lossy(&output.stderr)).collect()
}

fn pause(milliseconds: u64) {
    std::thread::sleep(Duration::from_millis(milliseconds));
}

#[test]
fn a_rank_killed_after_the_signal_does_not_cost_the_last_checkpoint() {
    for gone in [&[0][..], &[2], &[0, 1]] {
        let mut run = Run::start(1, 3, Some(1), &["--max-restarts", "5"]);
        run.stop(0);
        pause(5);
        gone.iter().for_each(|rank| run.kill(*rank));
        let outputs = run.end();
        run.saved(gone, &outputs);
        assert_eq!(outputs[0].status.code(), Some(0), "{}", texts(&outputs));
    }
}

#[test]
fn a_rank_killed_in_the_last_save_does_not_cost_it() {
    for gone in [0, 1] {
        let mut run = Run::start(1, 3, Some(2), &["--max-restarts", "5"]);
        run.stop_and_kill_in_the_save(0, &[gone]);
        let outputs = run.end();
        run.saved(&[gone], &outputs);
    }
}

/// The process that takes its place does not handle the signal yet.
#[test]
fn a_rank_killed_before_the_signal_is_given_up() {
    let mut run = Run::start(1, 3, Some(2), &["--max-restarts", "5"]);
    let killed = run.pid(1).unwrap();
    run.kill(1);
    // ddprun has seen its end.
    wait_for("its end", || rustix::process::test_kill_process(killed).is_err());
    run.stop(0);
    let outputs = run.end();
    run.saved(&[1], &outputs);
    assert!(texts(&outputs).contains("a new process takes its place"), "{}", texts(&outputs));
}

#[test]
fn ranks_that_are_too_few_to_continue_get_an_error_at_once() {
    for (gone, min) in [(&[1][..], None), (&[0, 2], Some(2))] {
        let mut run = Run::start(1, 3, min, &["--max-restarts", "5"]);
        run.stop_and_kill_in_the_save(0, gone);
        let outputs = run.end();
        assert_eq!(outputs[0].status.code(), Some(128 + 15), "{}", texts(&outputs));
        let errors = run.errors();
        assert_eq!(errors.len(), 3 - gone.len(), "{errors:?}: {}", texts(&outputs));
        for error in errors {
            let why = "its process was killed by SIGKILL, no process takes its place, because a signal ends the run, and the ";
            assert!(error.contains(why), "{error}");
        }
    }
}

#[test]
fn when_all_ranks_are_killed_after_the_signal_the_run_ends() {
    let mut run = Run::start(1, 3, Some(1), &["--max-restarts", "5"]);
    run.stop_and_kill_in_the_save(0, &[0, 1, 2]);
    let outputs = run.end();
    assert_eq!(outputs[0].status.code(), Some(128 + 15), "{}", texts(&outputs));
}

/// The agent of the other node, or the coordinator on this one, decides, until the last node has ended.
#[test]
fn on_two_nodes_the_other_ranks_save_as_well() {
    // Signals to either node, or both, and ranks of either, or all of one.
    for (signalled, gone) in
        [(&[0][..], &[1][..]), (&[0], &[2]), (&[1], &[0]), (&[1], &[3]), (&[0, 1], &[2]), (&[0, 1], &[0])]
    {
        // Too many for one node to continue alone.
        let mut run = Run::start(2, 2, Some(3), &["--max-restarts", "5"]);
        signalled.iter().for_each(|node| run.stop(*node));
        pause(5);
        gone.iter().for_each(|rank| run.kill(*rank));
        let outputs = run.end();
        run.saved(gone, &outputs);
        let codes: Vec<_> = outputs.iter().map(|output| output.status.code()).collect();
        assert!(codes.contains(&Some(0)), "{codes:?}: {}", texts(&outputs));
    }
}

#[test]
fn after_the_signal_the_store_remains_for_the_last_node() {
    let mut run = Run::start(2, 2, Some(2), &[]);
    run.stop_and_kill_in_the_save(0, &[0, 1]);
    let outputs = run.end();
    run.saved(&[0, 1], &outputs);
    let codes = [&outputs[0], &outputs[1]].map(|output| output.status.code());
    assert_eq!(codes, [Some(128 + 15), Some(0)], "{}", texts(&outputs));
}

#[test]
fn a_node_that_is_lost_after_the_signal_is_given_up() {
    let mut run = Run::start(2, 2, Some(2), &[]);
    run.stop(0);
    run.launchers[1].kill().unwrap();
    let outputs = run.end();
    run.saved(&[2, 3], &outputs);
    assert_eq!(outputs[0].status.code(), Some(0), "{}", texts(&outputs));
}

/// A little before the signal or after it. [`RUNS`] says how often; each run prints what it does.
#[test]
fn ranks_killed_at_any_time_around_the_signal() {
    let runs = std::env::var(RUNS).map_or(4, |runs| runs.parse().unwrap());
    let mut random = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
    let mut below = |limit: u64| {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (random >> 33) % limit
    };
    for number in 0..runs {
        let (nodes, before) = (1 + below(2) as usize, below(4) == 0);
        let min = [1, 2, 3][below(3) as usize];
        let delay = below(40);
        let mut gone: Vec<usize> = (0..=below(2)).map(|_| below(4) as usize).collect();
        gone.dedup();
        println!("run {number}: {nodes} node(s), at least {min}, ranks {gone:?}, {delay} ms, before: {before}");
        let begin = Instant::now();
        let mut run = Run::start(nodes, 4 / nodes, Some(min), &["--max-restarts", "5"]);
        let kill = |run: &Run| gone.iter().for_each(|rank| run.kill(*rank));
        if before {
            kill(&run);
            pause(delay);
        }
        (0..nodes).for_each(|node| run.stop(node));
        if !before {
            pause(delay);
            kill(&run);
        }
        let outputs = run.end();
        let ended: Vec<usize> = (0..4).filter(|rank| run.read(&format!("ended{rank}")).is_some()).collect();
        println!("ended: {ended:?} after {:?}, {:?}", begin.elapsed(), run.errors());
        if nodes == 1 && 4 - gone.len() >= min {
            run.saved(&gone, &outputs);
        }
    }
}
