//! Checkpoints of whole runs: resumed in any world, damaged, removed, and failures.
use crate::common::{
    assert_error, buckets, fill, floats, going_on, pass_on_a_full_disk, ranks, sharding, tensor, try_ranks,
};
use candle_core::{DType, Device, Module, Tensor, Var};
use candle_ddp::amp::{GradScaler, GradScalerOptions};
use candle_ddp::checkpoint::{Checkpointer, CheckpointerOptions, Parts, SaveHandle, Serde, StateDict};
use candle_ddp::nn::Dropout;
use candle_ddp::optim::{AdamW, CosineAnnealingLr, Optimizer, ParamsAdamW, ParamsCosineAnnealingLr};
use candle_ddp::seed::Generator;
use candle_ddp::{DdpOptions, DistributedDataParallel, Error, ProcessGroup, Result};
use candle_ddp_state::placement::Spread;
use candle_ddp_state::state::{PutInPlace, Saved, Share};
use candle_nn::{Func, Init, VarBuilder, VarMap, func, linear};
use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::sync::{Arc, Mutex};

/// A model of sizes that no number of ranks divides.
fn net(vb: VarBuilder, generator: &Arc<Mutex<Generator>>, p: f32) -> candle_core::Result<Func<'static>> {
    let dropout = Dropout::with_generator(p, generator.clone());
    let (first, second) = (linear(5, 7, vb.pp("first"))?, linear(7, 3, vb.pp("second"))?);
    Ok(func(move |x| second.forward(&dropout.forward(&first.forward(x)?.tanh()?, true)?)))
}

struct Run {
    varmap: VarMap,
    ddp: DistributedDataParallel<Func<'static>>,
    optimizer: Box<dyn Optimizer>,
    schedule: CosineAnnealingLr,
    scaler: GradScaler,
    generator: Arc<Mutex<Generator>>,
    best: f64,
    losses: Serde<Vec<f32>>,
}

impl Parts for Run {
    fn parts(&mut self) -> Vec<(&str, &mut dyn StateDict)> {
        let Self { varmap, optimizer, schedule, scaler, generator, best, losses, .. } = self;
        vec![
            ("model", varmap),
            ("optimizer", optimizer),
            ("schedule", schedule),
            ("scaler", scaler),
            ("dropout", generator),
            ("best", best),
            ("losses", losses),
        ]
    }
}

impl Run {
    fn new(pg: &ProcessGroup, zero: bool, p: f32, seed: u64) -> Result<Self> {
        let varmap = VarMap::new();
        let generator = Arc::new(Mutex::new(Generator::for_rank(seed, pg.rank())));
        // Buckets of a few parameters each.
        let options = DdpOptions { sharding: sharding(zero), buckets: buckets(1e-4, 5e-5), ..Default::default() };
        let build = |vb| net(vb, &generator, p);
        let ddp = DistributedDataParallel::with_options(pg, &varmap, build, options)?;
        fill(&varmap, seed);
        let params = ParamsAdamW { lr: 0.01, weight_decay: 0.1, ..Default::default() };
        let mut optimizer: Box<dyn Optimizer> = Box::new(AdamW::new(&ddp, params)?);
        let params = ParamsCosineAnnealingLr { t_max: 10, ..Default::default() };
        let schedule = CosineAnnealingLr::new(&mut optimizer, params)?;
        let options = GradScalerOptions { growth_interval: 2, ..Default::default() };
        let scaler = GradScaler::new(pg, &ddp, options)?;
        let (best, losses) = (f64::INFINITY, Serde(Vec::new()));
        Ok(Self { varmap, ddp, optimizer, schedule, scaler, generator, best, losses })
    }

    fn train(&mut self, steps: std::ops::Range<u64>) -> Result<()> {
        let pg = self.ddp.process_group().clone();
        let part = 12 / pg.world_size();
        for step in steps {
            let x = tensor(&[12, 5], 100 + step).narrow(0, part * pg.rank(), part)?;
            let loss = self.ddp.forward(&x)?.sqr()?.mean_all()?;
            let mut grads = self.ddp.backward(&self.scaler.scale(&loss)?)?;
            self.scaler.step(&mut self.optimizer, &mut grads)?;
            self.scaler.update()?;
            self.schedule.step(&mut self.optimizer)?;
            let loss = pg.all_reduce_scalars([f64::from(loss.to_scalar::<f32>()?)], candle_ddp::ReduceOp::Avg)?[0];
            self.best = self.best.min(loss);
            self.losses.0.push(loss as f32);
        }
        Ok(())
    }

    /// Everything, by name, as bits. All ranks call it.
    fn state(&mut self) -> Result<Vec<(String, Vec<u64>)>> {
        let mut state = Vec::new();
        for (part, dict) in self.parts() {
            for (name, tensor) in dict.state_dict()? {
                let values = tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
                state.push((format!("{part}.{name}"), values.into_iter().map(f64::to_bits).collect()));
            }
        }
        state.sort();
        Ok(state)
    }
}

fn names(folder: &Path) -> BTreeSet<String> {
    folder.read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[track_caller]
fn expect(folder: &Path, expected: &[&str]) {
    assert_eq!(names(folder), expected.iter().map(|name| name.to_string()).collect());
}

#[test]
fn a_run_that_is_resumed_is_the_run_without_a_break() {
    for (world_size, zero) in [(1, false), (2, false), (3, false), (1, true), (2, true), (3, true)] {
        let folder = tempfile::tempdir().unwrap();
        let straight = ranks(world_size, |pg| {
            let mut run = Run::new(&pg, zero, 0.3, 7)?;
            run.train(0..6)?;
            run.state()
        });
        ranks(world_size, |pg| {
            let mut run = Run::new(&pg, zero, 0.3, 7)?;
            let mut checkpointer = going_on(&pg, folder.path())?;
            run.train(0..3)?;
            let saved = checkpointer.save(3, &mut run)?;
            // Later changes are not in the checkpoint.
            run.train(3..4)?;
            assert_eq!(saved.wait()?, folder.path().join("step-00000003"));
            assert!(saved.is_done());
            Ok(())
        });
        let resumed = ranks(world_size, |pg| {
            let mut run = Run::new(&pg, zero, 0.3, 8)?;
            // The seed comes from the checkpoint.
            *run.generator.lock().unwrap() = Generator::for_rank(0, pg.rank());
            assert_eq!(going_on(&pg, folder.path())?.load_latest(&mut run)?, Some(3));
            run.train(3..6)?;
            run.state()
        });
        assert_eq!(resumed, straight, "{world_size} ranks, zero: {zero}");
        let of_rank = |name: &str, rank: usize| format!("{name}-{rank:05}-of-{world_size:05}.safetensors");
        let of_ranks = (0..world_size).flat_map(|rank| {
            let optimizer = if zero { of_rank("optimizer", rank) } else { "optimizer.safetensors".to_string() };
            [optimizer, of_rank("dropout", rank)]
        });
        let parts = ["model", "schedule", "scaler", "best", "losses"].map(|name| format!("{name}.safetensors"));
        let expected = of_ranks.chain(parts).chain(["checkpoint.json".to_string()]).collect::<BTreeSet<_>>();
        assert_eq!(names(&folder.path().join("step-00000003")), expected);
        // candle's own way to load the model.
        let mut varmap = VarMap::new();
        let generator = Arc::new(Mutex::new(Generator::new(0)));
        net(VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu), &generator, 0.).unwrap();
        varmap.load(folder.path().join("step-00000003/model.safetensors")).unwrap();
    }
}

/// The value that all of its parts have, which is changed in place as optimizers do.
struct Filled(Var);

impl Filled {
    fn new(value: f32, elements: usize) -> Self {
        Self(Var::from_tensor(&Tensor::full(value, elements, &Device::Cpu).unwrap()).unwrap())
    }

    fn set(&self, value: f32) {
        self.0.set(&Tensor::full(value, self.0.shape(), &Device::Cpu).unwrap()).unwrap();
    }

    fn values(&self) -> Vec<f32> {
        floats(&self.0)
    }
}

impl StateDict for Filled {
    fn state_dict(&self) -> Result<HashMap<String, Tensor>> {
        Ok(HashMap::from([("w".to_string(), self.0.as_tensor().clone())]))
    }

    fn load_state_dict(&mut self, state: &HashMap<String, Tensor>) -> Result<()> {
        Ok(self.0.set(&state["w"])?)
    }
}

#[test]
fn a_save_has_the_values_of_its_moment() {
    let folder = tempfile::tempdir().unwrap();
    ranks(2, |pg| {
        let mut state = Filled::new(0., 1 << 20);
        let mut checkpointer = going_on(&pg, folder.path())?;
        let mut handles: Vec<SaveHandle> = Vec::new();
        for step in 1..=5 {
            state.set(step as f32);
            handles.push(checkpointer.save(step, ("state", &mut state))?);
            state.set(-1.);
            // One at a time.
            assert!(handles[..handles.len() - 1].iter().all(SaveHandle::is_done));
        }
        assert_eq!(checkpointer.load_latest(("state", &mut state))?, Some(5));
        assert!(state.values().iter().all(|value| *value == 5.));
        if pg.rank() == 0 {
            std::fs::remove_file(folder.path().join("step-00000005/checkpoint.json")).unwrap();
        }
        pg.barrier()?;
        assert_eq!(checkpointer.load_latest(("state", &mut state))?, Some(4));
        assert!(state.values().iter().all(|value| *value == 4.));
        Ok(())
    });
}

#[test]
fn the_newest_and_the_best_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    ranks(2, |pg| {
        let mut state = Filled::new(0., 3);
        let options = CheckpointerOptions { every: 2, resume: true, ..Default::default() };
        let mut saver = Checkpointer::new(&pg, root, options.clone())?;
        assert_eq!(saver.load_latest(("state", &mut state))?, None);
        assert_eq!(saver.load_best(("state", &mut state))?, None);
        for step in 1..=8u64 {
            state.set(step as f32);
            let saved = match step {
                2 | 4 => Some(saver.save_best(step, ("state", &mut state))?),
                _ => saver.save_if_due(step, ("state", &mut state))?,
            };
            assert_eq!(saved.is_some(), step % 2 == 0);
        }
        saver.finish()?;
        if pg.rank() == 0 {
            expect(root, &["step-00000004", "step-00000006", "step-00000008"]);
        }
        assert_eq!(saver.load_best(("state", &mut state))?, Some(4));
        assert_eq!(state.values(), [4.0; 3]);
        // To save an earlier step is a mistake, unless the later ones are moved away.
        assert_error(saver.save(6, ("state", &mut state)), &["step-00000008 is of a later step than 6"]);
        drop(saver);
        let mut other = Checkpointer::new(&pg, root, options.clone())?;
        assert_error(other.save(1, ("state", &mut state)), &["step-00000008 is of a later step than 1"]);
        // The same step is saved once more.
        assert_eq!(other.save(8, ("state", &mut state))?.wait()?, root.join("step-00000008-2"));
        assert_eq!(other.load_latest(("state", &mut state))?, Some(8));
        assert_eq!(state.values(), [4.0; 3]);
        // Ranks that do not do the same.
        let every = 1 + pg.rank() as u64;
        let error =
            Checkpointer::new(&pg, root, CheckpointerOptions { every, ..options.clone() }).unwrap_err().to_string();
        assert!(error.contains("all ranks must give the same options") && error.contains("every: 2"), "{error}");
        let error = Checkpointer::new(&pg, root, CheckpointerOptions { keep: 0, ..options }).unwrap_err().to_string();
        assert!(error.contains("keep: it must be at least 1"), "{error}");
        let name = if pg.rank() == 0 { "state" } else { "other" };
        let refused = other.save(9, (name, &mut state));
        assert_error(
            refused,
            &["all ranks must save the same parts of the same step: part other, the same on all ranks on rank 1"],
        );
        assert_error(other.save(9, ("a/b", &mut state)), &["is not a valid part name"]);
        pg.barrier()
    });
}

#[test]
fn what_is_damaged_is_passed_over() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let options = CheckpointerOptions { keep: 4, resume: true, ..Default::default() };
    ranks(2, |pg| {
        let mut checkpointer = Checkpointer::new(&pg, root, options.clone())?;
        let mut state = Filled::new(0., 3);
        for step in 1..=4 {
            state.set(step as f32);
            checkpointer.save(step, ("state", &mut state))?;
        }
        Ok(())
    });
    let file = |step: u64, name: &str| root.join(format!("step-{step:08}")).join(name);
    // Bytes are missing from one, of one nothing but the length is right, and one has no index.
    let whole = std::fs::read(file(2, "state.safetensors")).unwrap();
    std::fs::write(file(2, "state.safetensors"), &whole[..whole.len() - 1]).unwrap();
    std::fs::write(file(3, "state.safetensors"), vec![b'x'; whole.len()]).unwrap();
    std::fs::remove_file(file(4, "checkpoint.json")).unwrap();
    ranks(2, |pg| {
        let mut state = Filled::new(0., 3);
        let mut checkpointer = Checkpointer::new(&pg, root, CheckpointerOptions { keep: 2, ..options.clone() })?;
        assert_eq!(checkpointer.load_latest(("state", &mut state))?, Some(1));
        assert_eq!(state.values(), [1.0; 3]);
        // Damaged ones are neither in the way nor counted.
        for step in 2..=3 {
            checkpointer.save(step, ("state", &mut state))?;
        }
        checkpointer.finish()
    });
    expect(root, &["step-00000002", "step-00000002-2", "step-00000003", "step-00000003-2", "step-00000004"]);
}

/// A number that only some ranks load.
struct Choosy {
    value: f64,
    refuses: bool,
}

impl StateDict for Choosy {
    fn state_dict(&self) -> Result<HashMap<String, Tensor>> {
        self.value.state_dict()
    }

    fn load_state_dict(&mut self, state: &HashMap<String, Tensor>) -> Result<()> {
        if self.refuses && self.value == 0. {
            let reason = "it is refused".to_string();
            return Err(Error::Io { context: "loading".to_string(), error: std::io::Error::other(reason) });
        }
        self.value.load_state_dict(state)
    }
}

#[test]
fn all_parts_are_loaded_on_all_ranks_or_none_on_any() {
    let folder = tempfile::tempdir().unwrap();
    for (zero, step) in [(false, 2), (true, 4)] {
        ranks(3, |pg| {
            let mut checkpointer = going_on(&pg, folder.path())?;
            let mut run = Run::new(&pg, zero, 0.3, 7)?;
            run.train(0..2)?;
            let mut choosy = Choosy { value: 1., refuses: false };
            checkpointer.save(step, (&mut run, ("choosy", &mut choosy)))?;
            let mut run = Run::new(&pg, zero, 0.3, 8)?;
            run.train(0..1)?;
            let before = run.state()?;
            let mut choosy = Choosy { value: 0., refuses: pg.rank() == 1 };
            let mut load =
                |run: &mut Run, choosy: &mut Choosy| checkpointer.load_latest((&mut *run, ("choosy", &mut *choosy)));
            match (pg.rank(), load(&mut run, &mut choosy)) {
                (1, Err(Error::CheckpointPart { part, error, .. })) => {
                    assert!(part == "choosy" && error.to_string().contains("it is refused"), "{error}");
                }
                (0 | 2, Err(Error::RankFailed { rank: 1, reason })) => assert!(reason.contains("it is refused")),
                (rank, other) => panic!("rank {rank}: {other:?}"),
            }
            assert_eq!(run.state()?, before);
            assert_eq!(choosy.value, 0.);
            choosy.refuses = false;
            assert_eq!(load(&mut run, &mut choosy)?, Some(step));
            assert!(run.state()? != before && choosy.value == 1.);
            // A part that is not there, and a model that is another one.
            let mut nothing = 0.;
            let refused = checkpointer.load_latest(("nothing", &mut nothing));
            assert_error(refused, &[r#"has no part "nothing"; it has model, optimizer, "#]);
            let mut varmap = VarMap::new();
            varmap.get(2, "fc.bias", Init::Const(0.), DType::F32, &Device::Cpu)?;
            assert_error(checkpointer.load_latest(("model", &mut varmap)), &["missing from the file (1): fc.bias"]);
            pg.barrier()
        });
    }
}

/// A part of which each rank has its own, or cannot.
struct Own {
    elements: usize,
    fails: bool,
}

impl StateDict for Own {
    fn state_dict(&self) -> Result<HashMap<String, Tensor>> {
        unreachable!("it is spread over the ranks")
    }

    fn load_state_dict(&mut self, _: &HashMap<String, Tensor>) -> Result<()> {
        unreachable!("it is spread over the ranks")
    }

    fn share(&self) -> Result<Share> {
        if self.fails {
            return Err(Error::Io { context: "reading".into(), error: std::io::Error::other("no state today") });
        }
        let own = Tensor::zeros(self.elements, DType::F32, &Device::Cpu)?;
        Ok(Share::new(Spread::Own, HashMap::from([("own".to_string(), own)])))
    }

    fn prepare(&mut self, saved: Saved, _: usize, _: usize) -> Result<PutInPlace<'_>> {
        let Saved::Shards(shards) = saved else { unreachable!("it is spread over the ranks") };
        Ok(Box::new(move || {
            self.elements = shards.iter().map(|shard| shard["own"].elem_count()).sum();
            Ok(())
        }))
    }
}

#[test]
fn a_rank_without_a_state_is_an_error_on_all() {
    let folder = tempfile::tempdir().unwrap();
    ranks(3, |pg| {
        let mut checkpointer = going_on(&pg, folder.path())?;
        let mut own = Own { elements: 2, fails: pg.rank() == 1 };
        match (pg.rank(), checkpointer.save(1, ("own", &mut own))) {
            (1, Err(Error::Io { error, .. })) => assert!(error.to_string().contains("no state today")),
            (_, Err(Error::RankFailed { rank: 1, reason })) => assert!(reason.contains("no state today"), "{reason}"),
            (rank, other) => panic!("rank {rank}: {other:?}"),
        }
        own.fails = false;
        checkpointer.save(1, ("own", &mut own))?.wait()?;
        checkpointer.load_latest(("own", &mut own))?;
        assert_eq!(own.elements, 6);
        pg.barrier()
    });
    expect(folder.path(), &["step-00000001"]);
}

/// A link to nowhere takes the folder's place while the run continues.
#[test]
fn a_folder_that_cannot_be_written_any_more_is_an_error_on_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("taken");
    ranks(2, |pg| {
        let check = |error: Error| {
            let text = error.to_string();
            assert!(text.contains("making the folder") && text.contains("taken"), "{text}");
            let is_own = matches!(&error, Error::Io { .. });
            let is_others = matches!(&error, Error::RankFailed { rank: 0, .. });
            assert!(if pg.rank() == 0 { is_own } else { is_others }, "{error:?}");
        };
        let mut checkpointer = going_on(&pg, &root)?;
        if pg.rank() == 0 {
            std::fs::remove_dir(&root).unwrap();
            std::os::unix::fs::symlink(folder.path().join("deep/missing"), &root).unwrap();
        }
        pg.barrier()?;
        let save = |checkpointer: &mut Checkpointer| checkpointer.save(1, ("value", &mut 1.5));
        // Nobody asks the first handle: the next call reports it.
        save(&mut checkpointer)?;
        check(save(&mut checkpointer).unwrap_err());
        let handle = save(&mut checkpointer)?;
        check(handle.wait().unwrap_err());
        assert_error(handle.wait(), &["saving the checkpoint of step 1", "making the folder"]);
        checkpointer.finish()?;
        save(&mut checkpointer)?;
        check(checkpointer.finish().unwrap_err());
        // Once it can be written, all is well.
        if pg.rank() == 0 {
            std::fs::remove_file(&root).unwrap();
        }
        pg.barrier()?;
        save(&mut checkpointer)?.wait()?;
        pg.barrier()
    });
    expect(&root, &["step-00000001"]);
}

/// Runs itself in a process that may not write files of more than a few blocks, as on a full disk.
#[test]
fn a_full_disk_leaves_the_checkpoints_that_there_are() {
    const FOLDER: &str = "CANDLE_DDP_TEST_FULL_DISK_OF_A_CHECKPOINTER";
    const NAME: &str = "a_full_disk_leaves_the_checkpoints_that_there_are";
    if let Some(folder) = std::env::var_os(FOLDER) {
        // Rank 1's part alone does not fit.
        ranks(2, |pg| {
            let mut checkpointer = going_on(&pg, Path::new(&folder))?;
            let mut own = Own { elements: 10 + pg.rank() * 50_000, fails: false };
            let handle = checkpointer.save(2, (("value", &mut 2.0), ("own", &mut own)))?;
            match (pg.rank(), handle.wait()) {
                (1, Err(Error::Io { context, .. })) => assert!(context.contains("own-00001-of-00002"), "{context}"),
                (0, Err(Error::RankFailed { rank: 1, reason })) => assert!(reason.contains("writing"), "{reason}"),
                (rank, other) => panic!("rank {rank}: {other:?}"),
            }
            pg.barrier()
        });
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    ranks(1, |pg| going_on(&pg, folder.path())?.save(1, ("value", &mut 1.0))?.wait());
    pass_on_a_full_disk(16, module_path!(), NAME, (FOLDER, folder.path()));
    expect(folder.path(), &["step-00000001"]);
    let values = ranks(1, |pg| {
        let mut value = 0.;
        assert_eq!(going_on(&pg, folder.path())?.load_latest(("value", &mut value))?, Some(1));
        Ok(value)
    });
    assert_eq!(values, [1.0]);
}

/// An error in training does not spoil the checkpoint that is being written.
#[test]
fn a_save_ends_well_where_training_fails() {
    let folder = tempfile::tempdir().unwrap();
    let error = try_ranks(2, |pg| {
        let mut state = Filled::new(3., 1 << 20);
        let mut checkpointer = going_on(&pg, folder.path())?;
        let _handle = checkpointer.save(3, ("state", &mut state))?;
        if pg.rank() == 1 {
            pg.abort("a layer failed");
        }
        pg.barrier()
    });
    assert!(error.unwrap_err().to_string().contains("a layer failed"));
    ranks(1, |pg| {
        let mut state = Filled::new(0., 1 << 20);
        assert_eq!(going_on(&pg, folder.path())?.load_latest(("state", &mut state))?, Some(3));
        assert!(state.values().iter().all(|value| *value == 3.));
        Ok(())
    });
}
