//! Checkpoints that an earlier version of this crate wrote, in all kinds of training: they load into all kinds, on any number of ranks.
use crate::common::{assert_error, going_on, ranks, try_ranks};
use candle_core::{DType, Device, Module, Result, Tensor};
use candle_ddp::checkpoint::{self, Checkpointer, LoadOptions, PerRank, StateDict};
use candle_ddp::nn::{Func, func, gelu, linear, linear_no_bias};
use candle_ddp::optim::{AdamW, Ema, Muon, Optimizer, ParamsAdamW, ParamsMuon};
use candle_ddp::{DdpOptions, DistributedDataParallel, ProcessGroup, Sharding, block};
use candle_nn::{VarBuilder, VarMap};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A model with blocks that no number of ranks divides.
fn net(vb: VarBuilder<'static>) -> Result<Func<'static>> {
    let pair = |vb: VarBuilder<'static>| {
        let (first, second) = (linear(4, 5, vb.pp("first"))?, linear_no_bias(5, 4, vb.pp("second"))?);
        Ok(func(move |x| second.forward(&gelu(&first.forward(x)?)?)))
    };
    let blocks = (0..2).map(|index| block(vb.pp(format!("blocks.{index}")), pair)).collect::<Result<Vec<_>>>()?;
    let (stem, head) = (linear(3, 4, vb.pp("stem"))?, linear(4, 1, vb.pp("head"))?);
    Ok(func(move |x| head.forward(&blocks.iter().try_fold(stem.forward(x)?, |x, block| block.forward(&x))?)))
}

type Ddp = DistributedDataParallel<Func<'static>>;

/// How a model is trained.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Plain,
    Zero,
    Blocks,
    /// In blocks, which two ranks have together.
    Hybrid,
}

/// The folders, each with the number of ranks that wrote it, and whether they trained with Muon.
const FOLDERS: [(&str, Kind, usize, bool); 7] = [
    ("plain", Kind::Plain, 2, false),
    ("plain-muon", Kind::Plain, 2, true),
    ("zero", Kind::Zero, 2, false),
    ("zero-muon", Kind::Zero, 3, true),
    ("blocks-2", Kind::Blocks, 2, false),
    ("blocks-3", Kind::Blocks, 3, false),
    ("hybrid", Kind::Hybrid, 4, false),
];
const STEPS: u64 = 2;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/folders")
}

fn made(pg: &ProcessGroup, varmap: &VarMap, kind: Kind) -> candle_ddp::Result<Ddp> {
    let sharding = match kind {
        Kind::Plain => Sharding::Off,
        Kind::Zero => Sharding::Optimizer { ranks: None },
        Kind::Blocks => Sharding::Blocks { reshard_after_forward: true, ranks: None },
        Kind::Hybrid => Sharding::Blocks { reshard_after_forward: true, ranks: Some(2) },
    };
    DistributedDataParallel::with_options(pg, varmap, net, DdpOptions { sharding, ..Default::default() })
}

fn optimizer(ddp: &Ddp, is_muon: bool) -> candle_ddp::Result<Box<dyn Optimizer>> {
    let (muon, adamw) = (ParamsMuon { lr: 0.02, ..Default::default() }, ParamsAdamW { lr: 0.01, ..Default::default() });
    let by_adamw = |name: &str| name == "stem.weight";
    Ok(match is_muon {
        false => Box::new(AdamW::new(ddp, adamw)?),
        true => Box::new(Muon::with_adamw(ddp, muon, adamw, by_adamw)?),
    })
}

/// The whole model and the whole state of its optimizer, as files have them.
fn files(folder: &Path) -> [PathBuf; 2] {
    ["model.safetensors", "optimizer.safetensors"].map(|file| folder.join(file))
}

fn save_whole(pg: &ProcessGroup, varmap: &VarMap, optimizer: &dyn Optimizer, folder: &Path) -> candle_ddp::Result<()> {
    let [model, state] = files(folder);
    checkpoint::save_distributed(pg, varmap, model)?;
    optimizer.save_distributed(pg, &state)
}

/// The bytes of the tensors of whole files.
fn whole(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut all = BTreeMap::new();
    for (part, path) in ["model", "optimizer"].into_iter().zip(files(folder)) {
        for (name, tensor) in candle_core::safetensors::load(path, &Device::Cpu).unwrap() {
            let values = tensor.flatten_all().unwrap();
            let bytes = match values.dtype() {
                DType::F32 => values.to_vec1::<f32>().unwrap().into_iter().flat_map(f32::to_le_bytes).collect(),
                DType::F64 => values.to_vec1::<f64>().unwrap().into_iter().flat_map(f64::to_le_bytes).collect(),
                DType::I64 => values.to_vec1::<i64>().unwrap().into_iter().flat_map(i64::to_le_bytes).collect(),
                _ => values.to_vec1::<u8>().unwrap(),
            };
            all.insert(format!("{part} {name} {:?}", tensor.dims()), bytes);
        }
    }
    all
}

/// Files are not changed where they are: a Checkpointer cleans its folder.
fn copy_of(folder: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in folder.read_dir().unwrap() {
        let (from, to) = (entry.as_ref().unwrap().path(), to.join(entry.unwrap().file_name()));
        if from.is_dir() {
            copy_of(&from, &to);
        } else {
            std::fs::copy(&from, &to).unwrap();
        }
    }
}

#[test]
#[ignore = "it writes tests/golden/folders, which new versions must read"]
fn write_golden_folders() {
    for (name, kind, world_size, is_muon) in FOLDERS {
        let folder = golden().join(name);
        std::fs::create_dir_all(&folder).unwrap();
        ranks(world_size, |pg| {
            let mut varmap = VarMap::new();
            let ddp = made(&pg, &varmap, kind)?;
            let mut optimizer = optimizer(&ddp, is_muon)?;
            let mut ema = (kind == Kind::Plain).then(|| Ema::new(&ddp, 0.5)).transpose()?;
            for step in 0..STEPS {
                let value = |index: usize| ((index * 37 + step as usize * 11 + pg.rank() * 5) as f32 * 0.1).sin();
                let x = Tensor::from_vec((0..12).map(value).collect(), (4, 3), &Device::Cpu)?;
                let loss = ddp.forward(&x)?.sqr()?.mean_all()?;
                optimizer.step(&ddp.backward(&loss)?)?;
                ema.iter_mut().try_for_each(Ema::update)?;
            }
            let mut own = PerRank(10. + pg.rank() as f64);
            let mut parts: Vec<(&str, &mut dyn StateDict)> =
                vec![("model", &mut varmap), ("optimizer", &mut optimizer), ("own", &mut own)];
            parts.extend(ema.iter_mut().map(|ema| ("ema", ema as &mut dyn StateDict)));
            Checkpointer::new(&pg, &folder, Default::default())?.save(STEPS, &mut parts[..])?.wait()?;
            save_whole(&pg, &varmap, &*optimizer, &folder)?;
            if let Some(ema) = ema.filter(|_| pg.rank() == 0) {
                ema.save(folder.join("ema.safetensors"))?;
            }
            Ok(())
        });
    }
}

#[test]
fn folders_of_all_kinds_load_into_all_kinds_on_any_number_of_ranks() {
    let temporary = tempfile::tempdir().unwrap();
    for (name, _, wrote, is_muon) in FOLDERS {
        let (folder, read) = (temporary.path().join(name), temporary.path().join(format!("{name}-read")));
        copy_of(&golden().join(name), &folder);
        std::fs::create_dir(&read).unwrap();
        let expected = whole(&folder);
        assert!(expected.len() > 20, "{name}: {expected:?}");
        let kinds = [Kind::Plain, Kind::Zero, Kind::Blocks];
        for kind in kinds.into_iter().filter(|kind| !is_muon || *kind != Kind::Blocks) {
            for world_size in 1..=3 {
                let what = format!("{name}, into {kind:?} on {world_size} ranks");
                let loaded = try_ranks(world_size, |pg| {
                    let mut varmap = VarMap::new();
                    let ddp = made(&pg, &varmap, kind)?;
                    let mut optimizer = optimizer(&ddp, is_muon)?;
                    let mut checkpointer = going_on(&pg, &folder)?;
                    let mut own = PerRank(0.);
                    let mut parts: Vec<(&str, &mut dyn StateDict)> =
                        vec![("model", &mut varmap), ("optimizer", &mut optimizer)];
                    if world_size == wrote {
                        parts.push(("own", &mut own));
                    }
                    assert_eq!(checkpointer.load_latest(&mut parts[..])?, Some(STEPS));
                    assert_eq!(own.0, if world_size == wrote { 10. + pg.rank() as f64 } else { 0. });
                    save_whole(&pg, &varmap, &*optimizer, &read)
                });
                loaded.unwrap_or_else(|error| panic!("{what}: {error}"));
                assert!(whole(&read) == expected, "{what}");
            }
        }
    }
}

/// Files of whole states, the shards that `save_shards` of earlier versions wrote (no test can write them anew), and an average.
#[test]
fn files_that_are_not_a_checkpointers_load_on_any_number_of_ranks() {
    let (temporary, golden) = (tempfile::tempdir().unwrap(), golden());
    for world_size in 1..=3 {
        ranks(world_size, |pg| {
            let varmap = VarMap::new();
            let ddp = made(&pg, &varmap, Kind::Blocks)?;
            let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default())?;
            checkpoint::load_distributed(&pg, &varmap, &files(&golden.join("zero"))[0], LoadOptions::default())?;
            optimizer.load_distributed(&pg, &golden.join("zero"))?;
            save_whole(&pg, &varmap, &optimizer, temporary.path())
        });
        assert!(whole(temporary.path()) == whole(&golden.join("zero")), "{world_size} ranks");
        ranks(world_size, |pg| {
            let ddp = made(&pg, &VarMap::new(), Kind::Plain)?;
            let mut ema = Ema::new(&ddp, 0.5)?;
            ema.load(golden.join("plain").join("ema.safetensors"))?;
            assert_eq!(ema.updates(), STEPS);
            if pg.rank() == 0 {
                ema.save(temporary.path().join("ema"))?;
            }
            Ok(())
        });
        let bytes = |path: PathBuf| {
            let tensors = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
            let values = |tensor: Tensor| {
                format!("{:?}", tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>())
            };
            tensors.into_iter().map(|(name, tensor)| (name, values(tensor))).collect::<BTreeMap<_, _>>()
        };
        assert_eq!(bytes(temporary.path().join("ema")), bytes(golden.join("plain").join("ema.safetensors")));
    }
}

#[test]
fn shards_that_do_not_belong_together_are_refused_on_all_ranks_and_change_nothing() {
    let temporary = tempfile::tempdir().unwrap();
    let path = |name: &str| temporary.path().join(name);
    let shard = |rank: usize| format!("shard-{rank:05}-of-00002.safetensors");
    std::fs::create_dir(path("empty")).unwrap();
    for name in ["one", "mixed"] {
        std::fs::create_dir(path(name)).unwrap();
        (0..2).for_each(|rank| {
            std::fs::copy(golden().join("zero").join(shard(rank)), path(name).join(shard(rank))).unwrap();
        });
    }
    std::fs::remove_file(path("one").join(shard(1))).unwrap();
    // A shard of another save.
    let mut other = candle_core::safetensors::load(path("mixed").join(shard(1)), &Device::Cpu).unwrap();
    other.insert("saving".to_string(), Tensor::new(&[7i64], &Device::Cpu).unwrap());
    candle_core::safetensors::save(&other, path("mixed").join(shard(1))).unwrap();
    for kind in [Kind::Plain, Kind::Zero] {
        ranks(2, |pg| {
            let ddp = made(&pg, &VarMap::new(), kind)?;
            let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default())?;
            optimizer.load_distributed(&pg, &golden().join("zero"))?;
            let moments = |optimizer: &AdamW| {
                optimizer.state_dict()?["state.stem.weight.exp_avg"]
                    .flatten_all()?
                    .to_vec1::<f32>()
                    .map_err(candle_ddp::Error::from)
            };
            let before = moments(&optimizer)?;
            for (name, part) in
                [("empty", "no shard"), ("one", "00001-of-00002"), ("mixed", "interrupted"), ("absent", "absent")]
            {
                assert_error(optimizer.load_distributed(&pg, &path(name)), &[part]);
            }
            assert!(before.iter().any(|moment| *moment != 0.) && moments(&optimizer)? == before);
            Ok(())
        });
    }
}
