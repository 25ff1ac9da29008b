//! Checkpoints of ranks that are processes: killed while they save, and resumed.
//!
//! The processes are this test binary itself.
use crate::common::{fill, floats, going_on, of_zero, ranks, start_ranks, tensor};
use candle_core::{Device, Tensor, Var};
use candle_ddp::checkpoint::{Checkpointer, Parts, StateDict};
use candle_ddp::optim::{Optimizer, ParamsAdamW, ParamsMuon, ZeroRedundancyOptimizer};
use candle_ddp::seed::Generator;
use candle_ddp::{DistributedDataParallel, InitOptions, ProcessGroup, Result, init_process_group};
use candle_ddp_state::placement::Spread;
use candle_ddp_state::state::{PutInPlace, Saved, Share};
use candle_nn::{VarMap, linear};
use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

/// The folder of a rank's run.
const FOLDER: &str = "CANDLE_DDP_TEST_CHECKPOINTER";
/// The last step to train; unset for a run that saves until it is killed.
const STEPS: &str = "CANDLE_DDP_TEST_STEPS";

/// The entry point of ranks.
#[test]
#[ignore = "started by other tests"]
fn rank_of_another_test() {
    let folder = std::env::var_os(FOLDER).unwrap();
    let timeout = Duration::from_secs(120);
    let init_method = std::env::var("INIT_METHOD").unwrap();
    let pg = init_process_group(InitOptions { timeout, init_method, ..Default::default() }).unwrap();
    let ended = pg.abort_on_error(|| match std::env::var(STEPS) {
        Ok(steps) => train(&pg, Path::new(&folder), steps.parse().unwrap()),
        Err(_) => save_until_killed(&pg, Path::new(&folder)),
    });
    ended.unwrap();
}

/// Starts the ranks of a run.
fn start(folder: &Path, world_size: usize, steps: Option<u64>) -> Vec<Child> {
    let steps = steps.map(|steps| (STEPS, steps.to_string()));
    let folder = (FOLDER, folder.display().to_string());
    start_ranks(module_path!(), world_size, &steps.into_iter().chain([folder]).collect::<Vec<_>>())
}

/// Each rank's own part, of which every element is the step.
struct Own(Tensor);

fn filled(step: u64, elements: usize) -> Tensor {
    Tensor::full(step as f32, elements, &Device::Cpu).unwrap()
}

impl StateDict for Own {
    fn state_dict(&self) -> Result<HashMap<String, Tensor>> {
        Ok(HashMap::from([("own".to_string(), self.0.clone())]))
    }

    fn load_state_dict(&mut self, state: &HashMap<String, Tensor>) -> Result<()> {
        self.0 = state["own"].clone();
        Ok(())
    }

    fn share(&self) -> Result<Share> {
        Ok(Share::new(Spread::Own, self.state_dict()?))
    }

    fn prepare(&mut self, saved: Saved, _: usize, _: usize) -> Result<PutInPlace<'_>> {
        let Saved::Shards(shards) = saved else { unreachable!("each rank has its own") };
        self.0 = Tensor::cat(&shards.iter().filter_map(|shard| shard.get("own")).collect::<Vec<_>>(), 0)?;
        Ok(Box::new(|| Ok(())))
    }
}

/// A run whose whole state is its step.
struct Saving {
    varmap: VarMap,
    own: Own,
    number: u64,
}

impl Parts for Saving {
    fn parts(&mut self) -> Vec<(&str, &mut dyn StateDict)> {
        vec![("model", &mut self.varmap), ("own", &mut self.own), ("number", &mut self.number)]
    }
}

impl Saving {
    fn new() -> Self {
        let varmap = VarMap::new();
        varmap.data().lock().unwrap().insert("w".to_string(), Var::from_tensor(&filled(0, 20_000)).unwrap());
        Self { varmap, own: Own(filled(0, 5_000)), number: 0 }
    }

    /// Loads the newest checkpoint, and checks that all of its parts are of one step.
    fn load(&mut self, checkpointer: &mut Checkpointer) -> Result<u64> {
        let step = checkpointer.load_latest(&mut *self)?.unwrap_or(0);
        let weights = floats(&self.varmap.data().lock().unwrap()["w"]);
        let mut values = [weights, floats(&self.own.0), vec![self.number as f32]].concat();
        values.dedup();
        assert_eq!(values, [step as f32], "a mixture");
        Ok(step)
    }
}

/// The file in which a rank records the step whose `save` has returned, so that the one before is durable.
fn progress(folder: &Path, rank: usize) -> std::path::PathBuf {
    folder.join(format!("progress{rank}"))
}

fn save_until_killed(pg: &ProcessGroup, folder: &Path) -> Result<()> {
    let mut state = Saving::new();
    let mut checkpointer = going_on(pg, folder.join("run"))?;
    let first = state.load(&mut checkpointer)?;
    let progress = File::create(progress(folder, pg.rank())).unwrap();
    progress.write_all_at(&first.to_le_bytes(), 0).unwrap();
    for step in first + 1.. {
        state.varmap.data().lock().unwrap()["w"].set(&filled(step, 20_000))?;
        (state.own, state.number) = (Own(filled(step, 5_000)), step);
        checkpointer.save(step, &mut state)?;
        progress.write_all_at(&step.to_le_bytes(), 0).unwrap();
    }
    Ok(())
}

/// Kills ranks of a saving run at random moments, and checks the checkpoints that are left. On a busy machine, few saves end before
/// their ranks do, so it continues until one has ended and one was interrupted.
fn kill(times: u64) {
    let folder = tempfile::tempdir().unwrap();
    let mut random = Generator::new(u64::from(std::process::id()));
    let (mut last, mut with_leftovers, mut kills) = (0, 0, 0);
    while kills < times || (last == 0 || with_leftovers == 0) && kills < 10 * times {
        kills += 1;
        let _ = std::fs::remove_file(progress(folder.path(), 0));
        let _ = std::fs::remove_file(progress(folder.path(), 1));
        let mut ranks_ = start(folder.path(), 2, None);
        let told = |rank| -> Option<u64> {
            let bytes = std::fs::read(progress(folder.path(), rank)).ok()?;
            bytes.try_into().ok().map(u64::from_le_bytes)
        };
        let deadline = Instant::now() + Duration::from_secs(180);
        while told(0).is_none() || told(1).is_none() {
            assert!(Instant::now() < deadline, "the ranks did not start");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_micros(random.below(150_000)));
        // One, the other, or both; a survivor ends by itself.
        let victims = random.below(3);
        for (rank, child) in ranks_.iter_mut().enumerate() {
            if victims == 2 || victims == rank as u64 {
                child.kill().unwrap();
            }
        }
        while !ranks_.iter_mut().all(|child| child.try_wait().unwrap().is_some()) {
            assert!(Instant::now() < deadline, "a rank continues without the other");
            std::thread::sleep(Duration::from_millis(1));
        }
        let run = folder.path().join("run");
        let is_whole = |name: &str| run.join(name).join("checkpoint.json").exists();
        let names = || -> Vec<String> {
            // The folder is not there before the first save.
            let entries = run.read_dir().into_iter().flatten();
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
        };
        with_leftovers += u32::from(names().iter().any(|name| !is_whole(name)));
        let told = told(0).max(told(1)).unwrap();
        let step = ranks(1, |pg| {
            let mut checkpointer = going_on(&pg, &run)?;
            Saving::new().load(&mut checkpointer)
        });
        let step = step[0];
        assert!(step + 1 >= told, "step {step} was loaded, and {} was durable", told - 1);
        assert!(step >= last, "step {step} was loaded, and {last} before");
        assert!(names().len() <= 3 && names().iter().all(|name| is_whole(name)), "{:?}", names());
        last = step;
    }
    assert!(
        last > 0 && with_leftovers > 0,
        "step {last} was saved, and {with_leftovers} of {kills} saves were interrupted"
    );
    println!("{kills} kills, {with_leftovers} in a save, step {last}");
}

#[test]
fn killed_saves_leave_a_whole_checkpoint() {
    kill(30);
}

/// The same, more often.
#[test]
#[ignore = "takes a minute"]
fn two_hundred_killed_saves_leave_a_whole_checkpoint() {
    kill(200);
}

/// Continues from the newest checkpoint to step `steps`, and saves.
fn train(pg: &ProcessGroup, folder: &Path, steps: u64) -> Result<()> {
    let mut varmap = VarMap::new();
    let ddp = DistributedDataParallel::with_options(pg, &varmap, |vb| linear(5, 3, vb), of_zero())?;
    fill(&varmap, 7);
    // The weight belongs to one rank, and each rank has a piece of the bias.
    let (muon, adamw) = (ParamsMuon::default(), ParamsAdamW::default());
    let mut optimizer = ZeroRedundancyOptimizer::with_adamw(&ddp, muon, adamw, |_| false)?;
    let mut checkpointer = going_on(pg, folder)?;
    let done = checkpointer.load_latest((("model", &mut varmap), ("optimizer", &mut optimizer)))?.unwrap_or(0);
    for step in done..steps {
        let x = tensor(&[6, 5], 10 * step + pg.rank() as u64);
        optimizer.step(&ddp.backward(&ddp.forward(&x)?.sqr()?.mean_all()?)?)?;
    }
    // Dropping the checkpointer waits for it.
    checkpointer.save(steps, (("model", &mut varmap), ("optimizer", &mut optimizer))).map(drop)
}

#[test]
fn a_run_of_new_processes_is_the_run_without_a_break() {
    let folder = tempfile::tempdir().unwrap();
    let (straight, broken) = (folder.path().join("straight"), folder.path().join("broken"));
    for (folder, steps) in [(&straight, 6), (&broken, 3), (&broken, 6)] {
        for mut rank in start(folder, 2, Some(steps)) {
            assert!(rank.wait().unwrap().success());
        }
    }
    for file in ["model", "optimizer-00000-of-00002", "optimizer-00001-of-00002"] {
        let bytes =
            |run: &Path, step: u64| std::fs::read(run.join(format!("step-{step:08}/{file}.safetensors"))).unwrap();
        assert_eq!(bytes(&broken, 6), bytes(&straight, 6), "{file}");
        assert_ne!(bytes(&broken, 3), bytes(&straight, 6), "{file}");
    }
}
