//! Damaged, exchanged and unknown files of checkpoints: another checkpoint is loaded on all ranks, or none on any.
use crate::common::{assert_error, going_on, of_zero, ranks, tensor};
use candle_core::{Tensor, Var};
use candle_ddp::checkpoint::{Checkpointer, CheckpointerOptions, Parts, PerRank, Serde, StateDict};
use candle_ddp::data::LoaderState;
use candle_ddp::optim::{Ema, Optimizer, ParamsSgd, ZeroRedundancyOptimizer};
use candle_ddp::seed::Generator;
use candle_ddp::{DistributedDataParallel, Error, ProcessGroup, Result};
use candle_nn::{VarMap, linear};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// Every kind of part.
struct Run {
    varmap: VarMap,
    ddp: DistributedDataParallel<candle_nn::Linear>,
    optimizer: ZeroRedundancyOptimizer<ParamsSgd>,
    ema: Ema,
    loader: LoaderState,
    generator: Generator,
    own: PerRank<u64>,
    losses: Serde<Vec<f32>>,
}

impl Parts for Run {
    fn parts(&mut self) -> Vec<(&str, &mut dyn StateDict)> {
        let Self { varmap, optimizer, ema, loader, generator, own, losses, .. } = self;
        vec![
            ("model", varmap),
            ("optimizer", optimizer),
            ("ema", ema),
            ("loader", loader),
            ("generator", generator),
            ("own", own),
            ("losses", losses),
        ]
    }
}

impl Run {
    fn new(pg: &ProcessGroup) -> Result<Self> {
        let varmap = VarMap::new();
        let ddp = DistributedDataParallel::with_options(pg, &varmap, |vb| linear(3, 2, vb), of_zero())?;
        let params = ParamsSgd { lr: 0.1, momentum: 0.9, ..Default::default() };
        let optimizer = ZeroRedundancyOptimizer::new(&ddp, params)?;
        let ema = Ema::new(&ddp, 0.9)?;
        let generator = Generator::for_rank(7, pg.rank());
        let (own, losses) = (PerRank(0), Serde(Vec::new()));
        Ok(Self { varmap, ddp, optimizer, ema, loader: LoaderState::default(), generator, own, losses })
    }

    fn step(&mut self, step: u64) -> Result<()> {
        let x = tensor(&[4, 3], 10 * step + self.ddp.process_group().rank() as u64);
        self.optimizer.step(&self.ddp.backward(&self.ddp.forward(&x)?.sqr()?.mean_all()?)?)?;
        self.ema.update()?;
        self.generator.below(5);
        self.own.0 = 10 * step + self.ddp.process_group().rank() as u64;
        self.losses.0.push(step as f32);
        Ok(())
    }

    /// All values of this rank, as text.
    fn values(&mut self) -> Result<BTreeMap<String, String>> {
        let mut values = BTreeMap::new();
        for (part, state) in self.parts() {
            for (name, tensor) in state.state_dict()? {
                values.insert(format!("{part}.{name}"), format!("{tensor}"));
            }
        }
        Ok(values)
    }
}

type Values = BTreeMap<String, String>;

/// Saves steps 1 and 2 of a run of two ranks, whose samples depend on `run`. Returns the ranks' values after both.
fn save(folder: &Path, run: u64) -> Vec<[Values; 2]> {
    ranks(2, |pg| {
        let (mut training, mut checkpointer) = (Run::new(&pg)?, going_on(&pg, folder)?);
        let mut values = [Values::new(), Values::new()];
        for step in 1..=2 {
            training.step(100 * run + step)?;
            checkpointer.save(step, &mut training)?;
            values[step as usize - 1] = training.values()?;
        }
        checkpointer.finish()?;
        Ok(values)
    })
}

/// The files of one checkpoint.
fn files(folder: &Path, step: u64) -> Vec<PathBuf> {
    let folder = folder.join(format!("step-{step:08}")).read_dir().unwrap();
    let mut files: Vec<PathBuf> = folder.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

fn copy(from: &Path, to: &Path) {
    for step in [1, 2] {
        fs::create_dir_all(to.join(format!("step-{step:08}"))).unwrap();
        for file in files(from, step) {
            fs::copy(&file, to.join(file.strip_prefix(from).unwrap())).unwrap();
        }
    }
}

/// The values that each of two ranks with these folders loads.
fn load(folders: [&Path; 2]) -> Vec<std::result::Result<(Option<u64>, Values), Error>> {
    let links = tempfile::tempdir().unwrap();

    ranks(2, |pg| {
        // A checkpointer notices another disk when it is made, and not what happens to a disk afterwards.
        let link = links.path().join(pg.rank().to_string());
        symlink(folders[0], &link).unwrap();
        let mut checkpointer = going_on(&pg, &link)?;
        fs::remove_file(&link).unwrap();
        symlink(folders[pg.rank()], &link).unwrap();
        let mut run = Run::new(&pg)?;
        let step = checkpointer.load_latest(&mut run);
        let values = run.values()?;
        Ok(step.map(|step| (step, values)))
    })
}

/// A way to damage a file.
enum Damage {
    Bit(u64),
    Cut(u64),
    /// Exchanges it with the file of the same name in this folder.
    Exchange(PathBuf),
}

fn damage(file: &Path, damage: &Damage) {
    let mut bytes = fs::read(file).unwrap();
    match damage {
        Damage::Bit(place) => {
            let place = place % (8 * bytes.len() as u64);
            bytes[place as usize / 8] ^= 1 << (place % 8);
        }
        Damage::Cut(rest) => bytes.truncate((rest % bytes.len() as u64) as usize),
        Damage::Exchange(folder) => bytes = fs::read(folder.join(file.file_name().unwrap())).unwrap(),
    }
    fs::write(file, bytes).unwrap();
}

#[test]
fn a_file_that_is_not_the_one_that_was_saved_is_never_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let (saved, other, [first, second]) =
        (folder.path().join("saved"), folder.path().join("other"), ["0", "1"].map(|name| folder.path().join(name)));
    let values = save(&saved, 1);
    save(&other, 2);
    let of_step = |loaded: Vec<std::result::Result<(Option<u64>, Values), Error>>, what: &str| {
        let loaded: Vec<_> = loaded.into_iter().map(std::result::Result::unwrap).collect();
        assert_eq!(loaded[0].0, loaded[1].0, "{what}");
        let step = loaded[0].0.unwrap();
        for (rank, (_, loaded)) in loaded.iter().enumerate() {
            assert_eq!(loaded, &values[rank][step as usize - 1], "{what}, rank {rank}");
        }
        step
    };
    assert_eq!(of_step(load([&saved, &saved]), "undamaged"), 2);
    let mut random = Generator::new(3);
    let (names, mut fallen_back) = (files(&saved, 2), 0);
    // Some files, such as `own` and `loader`, have the same length in another checkpoint.
    for (turn, file) in names.iter().cycle().take(4 * names.len()).enumerate() {
        let kinds = [
            Damage::Bit(random.below(1 << 40)),
            Damage::Cut(random.below(1 << 40)),
            Damage::Exchange(saved.join("step-00000001")),
            Damage::Exchange(other.join("step-00000002")),
        ];
        let kind = &kinds[turn / names.len()];
        copy(&saved, &first);
        copy(&saved, &second);
        // On rank 0's disk, on rank 1's disk, or on both disks.
        for place in
            [&first, &second].into_iter().enumerate().filter(|(rank, _)| turn % 3 != *rank).map(|(_, place)| place)
        {
            damage(&place.join(file.strip_prefix(&saved).unwrap()), kind);
        }
        let what = format!("{}, turn {turn}", file.display());
        match file.file_name().unwrap() == "checkpoint.json" {
            // Rank 0 alone reads it. A new format is an error, and some bits belong to blanks.
            true if turn % 3 == 0 => assert_eq!(of_step(load([&first, &second]), &what), 2),
            true => match load([&first, &second]) {
                loaded if loaded.iter().all(std::result::Result::is_ok) => drop(of_step(loaded, &what)),
                loaded => assert!(matches!(&loaded[..], [Err(Error::CheckpointFile { .. }), Err(_)]), "{loaded:?}"),
            },
            false => {
                let step = of_step(load([&first, &second]), &what);
                let is_same = fs::read(file).unwrap()
                    == fs::read(first.join(file.strip_prefix(&saved).unwrap())).unwrap()
                    && fs::read(file).unwrap() == fs::read(second.join(file.strip_prefix(&saved).unwrap())).unwrap();
                // Some bits of a header change nothing that is loaded.
                assert!(step == 1 || is_same || matches!(kind, Damage::Bit(_)), "{what}");
                fallen_back += u32::from(step == 1);
            }
        }
    }
    assert!(fallen_back > 20, "{fallen_back}");
}

#[test]
fn a_folder_of_damaged_checkpoints_is_an_error_and_not_a_new_run() {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), 1);
    for step in [1, 2] {
        let model = folder.path().join(format!("step-{step:08}/model.safetensors"));
        damage(&model, &Damage::Bit(8 * fs::metadata(&model).unwrap().len() - 1));
    }
    let loaded = load([folder.path(); 2]);
    let [Err(Error::CheckpointFile { path, reason }), Err(Error::RankFailed { rank: 0, .. })] = &loaded[..] else {
        panic!("{loaded:?}");
    };
    assert!(path.ends_with("step-00000002") && reason.contains("no other checkpoint to fall back to"), "{reason}");
    assert!(reason.contains("model.safetensors is damaged: its tensors do not have the hash"), "{reason}");
}

#[test]
fn a_checkpoint_of_a_later_version_is_an_error_and_stays() {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), 1);
    let index = folder.path().join("step-00000002/checkpoint.json");
    fs::write(&index, r#"{"format": 3, "parts": "elsewhere"}"#).unwrap();
    let loaded = load([folder.path(); 2]);
    let [Err(Error::CheckpointFile { path, reason }), Err(Error::RankFailed { rank: 0, .. })] = &loaded[..] else {
        panic!("{loaded:?}");
    };
    assert!(path.ends_with("step-00000002") && reason.contains("its format is 3"), "{reason}");
    ranks(1, |pg| {
        // A run from scratch would mix its own with it.
        let refused = Checkpointer::new(&pg, folder.path(), CheckpointerOptions::default());
        assert_error(refused, &["it holds the checkpoint", "step-00000002"]);
        let mut checkpointer = going_on(&pg, folder.path())?;
        let mut varmap = VarMap::new();
        varmap.data().lock().unwrap().insert("w".to_string(), Var::from_tensor(&tensor(&[2], 1))?);
        assert_error(checkpointer.save(1, ("model", &mut varmap)), &["is of a later step than 1"]);
        for step in 3..6 {
            checkpointer.save(step, ("model", &mut varmap))?;
        }
        checkpointer.finish()?;
        assert_eq!(checkpointer.steps()?, [4, 5]);
        // A newer one, which this version knows, is loaded.
        assert_eq!(checkpointer.load_latest(("model", &mut varmap))?, Some(5));
        Ok(())
    });
    assert!(index.exists());
}

/// Other programs read the files, and files of others have no hash.
#[test]
fn files_of_other_programs_are_read_and_a_copied_hash_is_explained() {
    let folder = tempfile::tempdir().unwrap();
    let (own, other) = (folder.path().join("own.safetensors"), folder.path().join("other.safetensors"));
    let weights =
        |value: f32| [("w".to_string(), Tensor::new(&[value, 2.], &candle_core::Device::Cpu).unwrap())].into();
    candle_ddp::checkpoint::save_tensors(&weights(1.), &own).unwrap();
    let read = candle_core::safetensors::load(&own, &candle_core::Device::Cpu).unwrap();
    assert_eq!(read["w"].to_vec1::<f32>().unwrap(), [1., 2.]);
    candle_core::safetensors::save(&read, &other).unwrap();
    assert_eq!(candle_ddp::checkpoint::read(&other).unwrap()["w"].to_vec1::<f32>().unwrap(), [1., 2.]);
    // Another program has changed a value and kept the metadata.
    let mut bytes = fs::read(&own).unwrap();
    let place = bytes.len() - 8;
    bytes[place..place + 4].copy_from_slice(&3f32.to_le_bytes());
    fs::write(&own, bytes).unwrap();
    let error = candle_ddp::checkpoint::read(&own).unwrap_err();
    assert!(matches!(&error, Error::CheckpointFile { .. }), "{error:?}");
    assert!(error.to_string().contains("remove the entry candle_ddp.hash from the file's metadata"), "{error}");
}
