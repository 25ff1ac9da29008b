//! Runs that are asked to stop by a signal: all ranks save the same step and end with 0, and a restart changes no bit.
//!
//! The processes are this test binary itself, under `ddprun`.
use crate::common::launch_nodes;
use candle_core::{DType, Device, Tensor};
use candle_ddp::checkpoint::{Checkpointer, CheckpointerOptions, Parts, StateDict};
use candle_ddp::data::{DataLoader, Dataset, LoaderOptions};
use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW};
use candle_ddp::seed::Generator;
use candle_ddp::{
    DdpOptions, DistributedDataParallel, InitOptions, ProcessGroup, Result, StopSignals, init_process_group,
};
use candle_nn::{VarMap, linear};
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGTERM, SIGUSR1};
use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::os::unix::process::parent_id;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

const FOLDER: &str = "CANDLE_DDP_TEST_STOP_FOLDER";
/// Where the signal finds the run.
const PHASE: &str = "CANDLE_DDP_TEST_STOP_PHASE";
const STEPS: u64 = 24;
/// The step in or after which the run waits for the signal.
const AT: u64 = 10;

/// The entry point of ranks.
#[test]
#[ignore = "started by other tests"]
fn rank_of_another_test() {
    let folder = PathBuf::from(std::env::var_os(FOLDER).unwrap());
    let phase = Phase { name: std::env::var(PHASE).unwrap_or_default(), folder: folder.clone() };
    let stop_signals = StopSignals { sigterm: true, sigusr1: true };
    let timeout = Duration::from_secs(300);
    let pg = init_process_group(InitOptions { stop_signals, timeout, ..Default::default() }).unwrap();
    // Handlers run in the order in which they were installed.
    for signal in [SIGTERM, SIGUSR1] {
        signal_hook::flag::register(signal, Arc::clone(&NOTICED)).unwrap();
    }
    let ended = pg.abort_on_error(|| train(&pg, &folder, &phase)).unwrap();
    std::fs::write(folder.join(format!("ended{}", pg.rank())), ended.to_string()).unwrap();
}

/// Whether this process has noticed a signal, and with it the group.
static NOTICED: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

#[derive(Clone)]
struct Phase {
    name: String,
    folder: PathBuf,
}

impl Phase {
    /// In the phase `name`, says that this process is there, and waits until the signal has been sent.
    fn wait_in(&self, name: &str) {
        if self.name == name {
            std::fs::write(self.folder.join(format!("there.{}", std::process::id())), "").unwrap();
            let go = self.folder.join("go");
            wait_for(&go);
            // A process notices a signal some time after it was sent to it, or to its launcher.
            let signalled = std::fs::read_to_string(go).unwrap();
            if [std::process::id(), parent_id()].map(|id| id.to_string()).contains(&signalled) {
                while !NOTICED.load(Ordering::Relaxed) {
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
        }
    }
}

fn wait_for(path: &Path) {
    // Only so that no process is left behind by a test that has failed.
    let begin = Instant::now();
    while !path.exists() {
        assert!(begin.elapsed() < Duration::from_secs(300), "nobody made {}", path.display());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Samples that a generator changes, so that a restart must find the place in the epoch.
struct Samples(Phase);

impl Dataset for Samples {
    type Sample = (f32, f32);

    fn len(&self) -> usize {
        60
    }

    fn get(&self, index: usize, random: &mut Generator) -> Result<(f32, f32)> {
        if index == 13 {
            self.0.wait_in("data");
        }
        Ok((index as f32 / 60. + random.uniform(-0.1, 0.1) as f32, (index % 7) as f32))
    }
}

/// A part that takes its time to be saved.
struct Slow(Phase);

impl StateDict for Slow {
    fn state_dict(&self) -> Result<HashMap<String, Tensor>> {
        self.0.wait_in("save");
        Ok(HashMap::from([("none".to_string(), Tensor::zeros(1, DType::F32, &Device::Cpu)?)]))
    }

    fn load_state_dict(&mut self, _: &HashMap<String, Tensor>) -> Result<()> {
        Ok(())
    }
}

struct Training {
    varmap: VarMap,
    optimizer: AdamW,
    loader: DataLoader<Samples, (Tensor, Tensor)>,
    slow: Slow,
}

impl Parts for Training {
    fn parts(&mut self) -> Vec<(&str, &mut dyn StateDict)> {
        let Self { varmap, optimizer, loader, slow } = self;
        vec![("model", varmap), ("optimizer", optimizer), ("loader", loader), ("slow", slow)]
    }
}

/// Trains up to the last step or a stop, and returns the last step.
fn train(pg: &ProcessGroup, folder: &Path, phase: &Phase) -> Result<u64> {
    let varmap = VarMap::new();
    let options = DdpOptions { init_seed: Some(1), ..Default::default() };
    let ddp = DistributedDataParallel::with_options(pg, &varmap, |vb| linear(1, 1, vb), options)?;
    let optimizer = AdamW::new(&ddp, ParamsAdamW { lr: 0.05, ..Default::default() })?;
    let loader = DataLoader::new(Samples(phase.clone()), pg, LoaderOptions { batch_size: 3, ..Default::default() })?;
    let mut training = Training { varmap, optimizer, loader, slow: Slow(phase.clone()) };
    // Every seventh step, and before a stop.
    let options = CheckpointerOptions { every: 7, resume: true, ..Default::default() };
    let mut checkpointer = Checkpointer::new(pg, folder.join("run"), options)?;
    let mut step = checkpointer.load_latest(&mut training)?.unwrap_or(0);
    phase.wait_in("warm-up");
    'epochs: while step < STEPS {
        for batch in training.loader.iter() {
            let (x, y) = batch?;
            let loss = (ddp.forward(&x.unsqueeze(1)?)?.squeeze(1)? - y)?.sqr()?.mean_all()?;
            training.optimizer.step(&ddp.backward(&loss)?)?;
            step += 1;
            checkpointer.save_if_due(step, &mut training)?;
            if pg.stop_requested()? || step == STEPS {
                break 'epochs;
            }
            if step == AT && evaluate(pg, &ddp, phase)? {
                checkpointer.save(step, &mut training)?;
                break 'epochs;
            }
            if step == AT {
                phase.wait_in("step");
            }
        }
    }
    checkpointer.finish()?;
    if step == STEPS && pg.rank() == 0 {
        training.varmap.save(folder.join("final.safetensors"))?;
    }
    Ok(step)
}

/// Returns whether the ranks stopped in the middle of it.
fn evaluate(pg: &ProcessGroup, ddp: &DistributedDataParallel<candle_nn::Linear>, phase: &Phase) -> Result<bool> {
    for batch in 0..3 {
        ddp.forward(&Tensor::zeros((5, 1), DType::F32, pg.device())?)?;
        if batch == 1 {
            phase.wait_in("evaluation");
        }
        if pg.agree_on_stop()? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Starts `nodes` launchers of two ranks each.
fn start(folder: &Path, phase: &str, nodes: usize) -> Vec<Child> {
    let launchers = launch_nodes(module_path!(), nodes, 2, &["--shutdown-timeout", "600"]).into_iter();
    let start = |mut launcher: Command| {
        launcher.env(FOLDER, folder).env(PHASE, phase).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    launchers.map(start).collect()
}

/// Waits for the launchers, which must end with 0, and returns their messages.
fn finish(launchers: Vec<Child>) -> String {
    let outputs = launchers.into_iter().map(|launcher| launcher.wait_with_output().unwrap());
    let mut texts = String::new();
    for output in outputs {
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{:?}: {text}", output.status);
        texts.push_str(&text);
    }
    texts
}

/// The steps at which the ranks have ended, in rank order.
fn ended(folder: &Path, world_size: usize) -> Vec<u64> {
    let of_rank = |rank| std::fs::read_to_string(folder.join(format!("ended{rank}"))).unwrap().parse().unwrap();
    (0..world_size).map(of_rank).collect()
}

/// The processes that wait in the phase: at least `count`.
fn processes_in_phase(folder: &Path, count: usize) -> Vec<Pid> {
    loop {
        let names = folder.read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let pids = names.filter_map(|name| name.strip_prefix("there.")?.parse().ok());
        let pids: Vec<Pid> = pids.filter_map(Pid::from_raw).collect();
        if pids.len() >= count {
            return pids;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn last(folder: &Path) -> Vec<u8> {
    std::fs::read(folder.join("final.safetensors")).unwrap()
}

/// Sends a launcher a signal, and waits until it has forwarded it. Returns its process.
fn send(launcher: &mut Child, signal: Signal) -> Pid {
    let pid = Pid::from_child(launcher);
    kill_process(pid, signal).unwrap();
    let lines = BufReader::new(launcher.stderr.take().unwrap()).lines();
    let mut lines = lines.map_while(std::result::Result::ok);
    let line = lines.find(|line| line.contains("forwarded")).unwrap_or_default();
    assert!(line.contains("forwarded to"), "{signal:?}: {line}");
    // The rest must be read, or the launcher waits.
    std::thread::spawn(move || lines.for_each(drop));
    pid
}

/// Ends the phase, once the process or the launcher that got a signal has noticed it.
fn go(folder: &Path, signalled: Pid) {
    std::fs::write(folder.join("going"), signalled.as_raw_nonzero().to_string()).unwrap();
    std::fs::rename(folder.join("going"), folder.join("go")).unwrap();
}

enum To {
    Launcher(Signal),
    Worker(Signal),
}

/// Interrupts a run in `phase`, in a `step` that may depend on the order of the samples, and lets it continue to its end. Returns its
/// result.
fn interrupt(phase: &str, nodes: usize, to: To, step: Option<u64>) -> Vec<u8> {
    let world_size = 2 * nodes;
    let folder = tempfile::tempdir().unwrap();
    let mut launchers = start(folder.path(), phase, nodes);
    // Only the rank that reads the sample waits for it; the other waits in its backward pass.
    let pids = processes_in_phase(folder.path(), if phase == "data" { 1 } else { world_size });
    let signalled = match to {
        // The last one hosts no store.
        To::Launcher(signal) => send(launchers.last_mut().unwrap(), signal),
        To::Worker(signal) => {
            kill_process(pids[0], signal).unwrap();
            pids[0]
        }
    };
    go(folder.path(), signalled);
    finish(launchers);
    let steps = ended(folder.path(), world_size);
    assert_eq!(steps, vec![step.unwrap_or(steps[0]); world_size], "{phase}: all ranks end after the same step");
    assert!(steps[0] < STEPS, "{phase}");
    let newest = folder.path().join(format!("run/step-{:08}/checkpoint.json", steps[0]));
    assert!(newest.exists(), "{phase}");
    finish(start(folder.path(), "", nodes));
    assert_eq!(ended(folder.path(), world_size), vec![STEPS; world_size], "{phase}");
    last(folder.path())
}

#[test]
fn all_ranks_stop_after_the_same_step_and_a_restart_changes_no_bit() {
    let whole = [1, 2].map(|nodes| {
        let folder = tempfile::tempdir().unwrap();
        finish(start(folder.path(), "", nodes));
        last(folder.path())
    });
    let cases = [
        // The run stops after its first step.
        ("warm-up", 1, To::Launcher(Signal::TERM), Some(1)),
        // One signal to one worker is enough.
        ("step", 1, To::Worker(Signal::USR1), Some(AT + 1)),
        // The ranks ask.
        ("evaluation", 1, To::Launcher(Signal::TERM), Some(AT)),
        ("data", 1, To::Launcher(Signal::USR1), None),
        // The save completes, and the next step is the last.
        ("save", 1, To::Launcher(Signal::TERM), Some(8)),
        // On two nodes, one launcher stops all.
        ("step", 2, To::Launcher(Signal::TERM), Some(AT + 1)),
    ];
    for (phase, nodes, to, step) in cases {
        assert!(interrupt(phase, nodes, to, step) == whole[nodes - 1], "{phase} on {nodes} node(s): other bits");
    }
}
