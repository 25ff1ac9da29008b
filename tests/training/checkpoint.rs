//! Checkpoints: PyTorch's and our own, mismatches, and damage.
use crate::common::{assert_close, assert_error, fill, floats, plain, ranks, tensor, var};
use candle_core::{DType, Device, ModuleT, Tensor, Var};
use candle_ddp::checkpoint::{self, LoadOptions, LoadReport};
use candle_ddp::{Error, Failure};
use candle_nn::{FuncT, Module, VarBuilder, VarMap, func_t};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const NAMES: [&str; 8] =
    ["bn.bias", "bn.running_mean", "bn.running_var", "bn.weight", "conv.bias", "conv.weight", "fc.bias", "fc.weight"];

/// The model of the golden files.
fn net(vb: VarBuilder) -> candle_core::Result<FuncT<'static>> {
    let conv = candle_nn::conv2d(1, 3, 3, Default::default(), vb.pp("conv"))?;
    let bn = candle_nn::batch_norm(3, 1e-5, vb.pp("bn"))?;
    let fc = candle_nn::linear(12, 2, vb.pp("fc"))?;
    Ok(func_t(move |xs, train| {
        let xs = bn.forward_t(&conv.forward(xs)?, train)?.relu()?;
        fc.forward(&xs.flatten_from(1)?)
    }))
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// Variables for [`net`]. candle's batch norm takes copies of its running values, unless it is given variables, as here.
fn varmap(dtype: DType) -> VarMap {
    plain(|vb| net(vb), dtype, 1).1
}

fn values(varmap: &VarMap) -> Vec<Vec<f32>> {
    NAMES.iter().map(|name| floats(&var(varmap, name))).collect()
}

#[test]
fn pytorchs_checkpoints_load_and_compute_the_same() {
    let output = candle_core::safetensors::load(golden("checkpoint_output.safetensors"), &Device::Cpu).unwrap();
    for file in ["checkpoint.pt", "checkpoint.safetensors", "checkpoint_run.pth"] {
        for dtype in [DType::F32, DType::F64] {
            let varmap = varmap(dtype);
            let report = checkpoint::load_with(&varmap, golden(file), LoadOptions::default()).unwrap();
            assert_eq!(report.loaded, NAMES);
            assert_eq!(report.ignored, ["bn.num_batches_tracked"]);
            let net = net(VarBuilder::from_varmap(&varmap, dtype, &Device::Cpu)).unwrap();
            let y = net.forward_t(&output["x"].to_dtype(dtype).unwrap(), false).unwrap();
            assert_eq!(y.dtype(), dtype);
            assert_close(&floats(&y), &floats(&output["y"]), 1e-5, file);
        }
    }
}

#[test]
fn what_was_saved_is_loaded_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("weights");
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
        let (ours, other) = (varmap(dtype), varmap(dtype));
        fill(&other, 2);
        checkpoint::save(&ours, &file).unwrap();
        assert_ne!(values(&ours), values(&other));
        checkpoint::load(&other, &file).unwrap();
        assert_eq!(values(&ours), values(&other), "{dtype:?}");
        let mut names: Vec<String> = checkpoint::read(&file).unwrap().into_keys().collect();
        names.sort();
        assert_eq!(names, NAMES);
        // candle's own way to load it.
        let mut candles = varmap(dtype);
        candles.load(&file).unwrap();
        assert_eq!(values(&ours), values(&candles), "{dtype:?}");
    }
    assert_eq!(folder.path().read_dir().unwrap().count(), 1, "no temporary file is left");
    let usual = std::fs::File::create(folder.path().join("usual")).unwrap().metadata().unwrap().permissions();
    assert_eq!(file.metadata().unwrap().permissions(), usual, "others may read it, if they may read new files");
}

fn save(tensors: &HashMap<String, Tensor>) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    checkpoint::save_tensors(tensors, file.path()).unwrap();
    file
}

#[track_caller]
fn mismatch<T: std::fmt::Debug>(result: Result<T, Error>) -> (Vec<String>, Vec<String>, Vec<String>) {
    match result {
        Err(Error::CheckpointMismatch { missing, unexpected, different, .. }) => (missing, unexpected, different),
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_does_not_fit_is_listed_and_changes_nothing() {
    let varmap = varmap(DType::F32);
    let before = values(&varmap);
    let mut tensors = checkpoint::read(golden("checkpoint.pt")).unwrap();
    tensors.remove("fc.bias");
    tensors.remove("conv.weight");
    tensors.insert("fc2.weight".to_string(), tensor(&[2], 1));
    let file = save(&tensors);
    let result = checkpoint::load(&varmap, file.path());
    let text = result.as_ref().unwrap_err().to_string();
    assert!(text.contains("missing from the file (2): conv.weight, fc.bias"), "{text}");
    assert!(text.contains("not in the model (1): fc2.weight"), "{text}");
    assert!(text.contains(file.path().to_str().unwrap()), "{text}");
    let (missing, unexpected, different) = mismatch(result);
    assert_eq!((missing, unexpected), (vec!["conv.weight".into(), "fc.bias".into()], vec!["fc2.weight".into()]));
    assert!(different.is_empty());
    assert_eq!(values(&varmap), before);

    // Not strict: the same, returned.
    let lenient = LoadOptions { strict: false, ..Default::default() };
    let report = checkpoint::load_with(&varmap, file.path(), lenient.clone()).unwrap();
    assert_eq!(report.missing, ["conv.weight", "fc.bias"]);
    assert_eq!(report.unexpected, ["fc2.weight"]);
    assert_eq!(report.loaded.len(), 6);
    assert_eq!(floats(&var(&varmap, "fc.weight")), floats(&tensors["fc.weight"]));
    assert_eq!(floats(&var(&varmap, "fc.bias")), before[6]);

    // Another shape, or integers, never fit.
    let before = values(&varmap);
    tensors.insert("fc.bias".to_string(), tensor(&[2, 1], 1));
    tensors.insert("bn.bias".to_string(), Tensor::zeros(3, DType::U32, &Device::Cpu).unwrap());
    let (_, _, different) = mismatch(checkpoint::load_with(&varmap, save(&tensors).path(), lenient));
    let expected =
        ["bn.bias (u32[3] in the file, f32[3] in the model)", "fc.bias (f32[2, 1] in the file, f32[2] in the model)"];
    assert_eq!(different, expected);
    assert_eq!(values(&varmap), before);
}

#[test]
fn the_models_own_names_come_first() {
    let varmap = VarMap::new();
    for name in ["module.weight", "num_batches_tracked"] {
        let init = candle_nn::Init::Const(0.0);
        varmap.get(2, name, init, DType::F32, &Device::Cpu).unwrap();
    }
    let two = |value: f32| Tensor::new(&[value, value], &Device::Cpu).unwrap();
    let tensors =
        |names: [&str; 2]| HashMap::from([(names[0].to_string(), two(1.0)), (names[1].to_string(), two(2.0))]);
    for names in [["module.weight", "num_batches_tracked"], ["module.module.weight", "module.num_batches_tracked"]] {
        checkpoint::load(&varmap, save(&tensors(names)).path()).unwrap();
        assert_eq!(floats(&var(&varmap, "module.weight")), [1.0, 1.0]);
        assert_eq!(floats(&var(&varmap, "num_batches_tracked")), [2.0, 2.0], "it is loaded where the model has it");
        for name in ["module.weight", "num_batches_tracked"] {
            var(&varmap, name).zero_set().unwrap();
        }
    }
    assert_error(checkpoint::read(save(&tensors(["module.a", "a"])).path()), &["it has a twice"]);
    // The caller chooses the names that may be surplus.
    let all = LoadOptions { ignored: Arc::new(|name| name == "fc"), ..Default::default() };
    let mut more = tensors(["module.weight", "num_batches_tracked"]);
    more.insert("fc".to_string(), two(3.0));
    let report = checkpoint::load_with(&varmap, save(&more).path(), all.clone()).unwrap();
    assert_eq!(report.ignored, ["fc"]);
    more.insert("fc2".to_string(), two(3.0));
    assert_eq!(mismatch(checkpoint::load_with(&varmap, save(&more).path(), all.clone())).1, ["fc2"]);
    // In addition to the default, which it does not replace.
    more.remove("fc2");
    more.insert("bn.num_batches_tracked".to_string(), two(3.0));
    let report = checkpoint::load_with(&varmap, save(&more).path(), all.clone()).unwrap();
    assert_eq!(report.ignored, ["bn.num_batches_tracked", "fc"]);
}

/// A model with the variables `names`, of two zeros each, but for the head, which has three.
fn zeros(names: &[&str]) -> VarMap {
    let varmap = VarMap::new();
    for name in names {
        let count = if name.starts_with("head") { 3 } else { 2 };
        varmap.get(count, name, candle_nn::Init::Const(0.0), DType::F32, &Device::Cpu).unwrap();
    }
    varmap
}

#[test]
fn a_checkpoint_with_another_head_and_other_names_loads() {
    let two = |value: f32| Tensor::new(&[value, value], &Device::Cpu).unwrap();
    let names = ["module.backbone.a", "module.backbone.b", "module.head.weight", "module.head.old"];
    let saved = HashMap::from(names.map(|name| (name.to_string(), two(1.0))));
    let file = save(&saved);
    let varmap = zeros(&["encoder.a", "encoder.b", "head.weight", "head.bias"]);
    let value = |name: &str| floats(&var(&varmap, name));
    let skip = LoadOptions { skip: Arc::new(|name| name.starts_with("head.")), ..Default::default() };
    let options = LoadOptions { rename: Some(Arc::new(|name| name.replace("backbone.", "encoder."))), ..skip.clone() };

    // Without: everything that does not fit is named, and nothing is changed.
    let (missing, unexpected, different) =
        mismatch(checkpoint::load_with(&varmap, file.path(), LoadOptions::default()));
    assert_eq!(missing, ["encoder.a", "encoder.b", "head.bias"]);
    assert_eq!(unexpected, ["backbone.a", "backbone.b", "head.old"]);
    assert_eq!(different, ["head.weight (f32[2] in the file, f32[3] in the model)"]);
    let (missing, unexpected, different) = mismatch(checkpoint::load_with(&varmap, file.path(), skip));
    assert_eq!((missing.len(), unexpected.len(), different.len()), (2, 2, 0));
    assert_eq!(value("encoder.a"), [0.0, 0.0]);

    let check = |report: LoadReport| {
        assert_eq!(report.loaded, ["encoder.a", "encoder.b"]);
        assert_eq!(report.skipped, ["head.bias", "head.old", "head.weight"]);
        assert!(report.missing.is_empty() && report.unexpected.is_empty() && report.ignored.is_empty());
        assert_eq!((value("encoder.a"), value("head.weight")), (vec![1.0, 1.0], vec![0.0; 3]));
        var(&varmap, "encoder.a").zero_set().unwrap();
    };
    check(checkpoint::load_with(&varmap, file.path(), options.clone()).unwrap());
    check(checkpoint::load_tensors(&varmap, saved, options.clone()).unwrap());
    let reports = ranks(2, |pg| checkpoint::load_distributed(&pg, &varmap, file.path(), options.clone()));
    assert_eq!(reports[0], reports[1]);
    check(reports[0].clone());

    // Tensors that the program has changed.
    let mut changed = checkpoint::read(file.path()).unwrap();
    changed.retain(|name, _| name.starts_with("head"));
    let head =
        Tensor::cat(&[&changed.remove("head.old").unwrap(), &changed["head.weight"].narrow(0, 0, 1).unwrap()], 0);
    changed.insert("head.weight".to_string(), head.unwrap());
    let lenient = LoadOptions { strict: false, ..Default::default() };
    let report = checkpoint::load_tensors(&varmap, changed.clone(), lenient).unwrap();
    assert_eq!((report.loaded, report.missing.len()), (vec!["head.weight".to_string()], 3));
    assert_eq!(value("head.weight"), [1.0; 3]);
    let error = checkpoint::load_tensors(&varmap, changed, LoadOptions::default()).unwrap_err().to_string();
    assert!(error.starts_with("the map of tensors does not fit the model") && error.contains("head.bias"), "{error}");

    // Two names that become one.
    let merge = LoadOptions { rename: Some(Arc::new(|_| "encoder.a".to_string())), ..Default::default() };
    assert_error(checkpoint::load_with(&varmap, file.path(), merge), &["two of its names become encoder.a"]);
}

#[test]
fn integers_load_into_integers() {
    let varmap = VarMap::new();
    let counter = Var::from_tensor(&Tensor::new(&[1u32, 2], &Device::Cpu).unwrap()).unwrap();
    varmap.data().lock().unwrap().insert("counter".to_string(), counter);
    let file = save(&HashMap::from([("counter".to_string(), Tensor::new(&[7i64, 8], &Device::Cpu).unwrap())]));
    checkpoint::load(&varmap, file.path()).unwrap();
    assert_eq!(var(&varmap, "counter").to_vec1::<u32>().unwrap(), [7, 8]);
}

#[track_caller]
fn refused(path: &Path, words: &str) {
    let varmap = varmap(DType::F32);
    let before = values(&varmap);
    match checkpoint::load(&varmap, path) {
        Err(error @ (Error::CheckpointFile { .. } | Error::Io { .. })) => {
            let text = error.to_string();
            assert!(text.contains(words) && text.contains(path.to_str().unwrap()), "{text}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(values(&varmap), before);
}

#[test]
fn what_is_no_checkpoint_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    refused(folder.path(), "neither model.safetensors.index.json nor model.safetensors");
    refused(&folder.path().join("missing"), "No such file");
    let file = folder.path().join("file");
    let write = |bytes: &[u8], words: &str| {
        std::fs::write(&file, bytes).unwrap();
        refused(&file, words);
    };
    write(b"", "empty");
    write(b"a text, and not a short one", "neither");
    write(b"PK\x03\x04", "complete");
    write(b"version https://git-lfs.github.com/spec/v1", "git lfs pull");
    write(b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", "before 1.6");
    write(b"\xff\xff\xff\xff\xff\xff\xff\xff{\"a\":1}", "safetensors");
    write(b"\x07\0\0\0\0\0\0\0{\"a\":1}", "safetensors");
}

/// Every truncation and every damaged byte is an error, or changes nothing that matters.
#[test]
fn damaged_files_are_errors_and_never_panics() {
    let folder = tempfile::tempdir().unwrap();
    let damaged = folder.path().join("damaged");
    let own = folder.path().join("own.safetensors");
    checkpoint::save_tensors(&checkpoint::read(golden("checkpoint.safetensors")).unwrap(), &own).unwrap();
    for path in [golden("checkpoint.pt"), golden("checkpoint.safetensors"), own] {
        let name = path.file_name().unwrap().to_str().unwrap();
        let whole = std::fs::read(&path).unwrap();
        let texts = |tensors: HashMap<String, Tensor>| -> HashMap<String, String> {
            tensors.into_iter().map(|(name, tensor)| (name, tensor.to_string())).collect()
        };
        let expected = texts(checkpoint::read(&path).unwrap());
        for length in (0..whole.len()).step_by(3) {
            std::fs::write(&damaged, &whole[..length]).unwrap();
            match checkpoint::read(&damaged) {
                Err(Error::CheckpointFile { .. }) => {}
                other => panic!("{name}, {length}: {other:?}"),
            }
        }
        let mut refused = 0;
        for position in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[position] ^= 1 << (position % 8);
            std::fs::write(&damaged, &bytes).unwrap();
            match checkpoint::read(&damaged) {
                Err(Error::CheckpointFile { .. }) => refused += 1,
                Ok(read) => {
                    // A zip archive has checksums, and a file of this crate a hash, so that only unread bytes may have changed.
                    let same = |(name, text): (&String, &String)| expected.get(name) == Some(text);
                    assert!(name == "checkpoint.safetensors" || texts(read).iter().all(same), "{name}, {position}");
                }
                Err(other) => panic!("{name}, {position}: {other:?}"),
            }
        }
        assert!(refused > 100, "{name}: {refused}");
    }
}

#[test]
fn the_key_of_a_state_dict_can_be_given() {
    let load = |key: &str| {
        let options = LoadOptions { key: Some(key.to_string()), ..Default::default() };
        checkpoint::load_with(&varmap(DType::F32), golden("checkpoint_run.pth"), options)
    };
    assert_eq!(load("model").unwrap().loaded, NAMES);
    assert_error(load("weights"), &["no dict under \"weights\"", "optimizer"]);
}

#[test]
fn all_ranks_learn_of_a_failure() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("weights");
    let outcomes = ranks(3, |pg| {
        let varmap = varmap(DType::F32);
        fill(&varmap, pg.rank() as u64);
        let before = values(&varmap);
        let broken = checkpoint::save_distributed(&pg, &varmap, folder.path().join("missing").join("file"));
        checkpoint::save_distributed(&pg, &varmap, &file)?;
        // Rank 1's host has no such file.
        let path = if pg.rank() == 1 { folder.path().join("elsewhere") } else { file.clone() };
        let refused = checkpoint::load_distributed(&pg, &varmap, path, LoadOptions::default());
        assert_eq!(values(&varmap), before, "nobody has loaded anything");
        let loaded = checkpoint::load_distributed(&pg, &varmap, &file, LoadOptions::default())?;
        Ok((broken, refused, loaded, values(&varmap)))
    });
    let rank0 = varmap(DType::F32);
    fill(&rank0, 0);
    for (rank, (broken, refused, loaded, now)) in outcomes.into_iter().enumerate() {
        let by = |error: Error, culprit: usize| match error {
            Error::Io { .. } => assert_eq!(rank, culprit),
            Error::RankFailed { rank: peer, reason } => {
                assert_eq!(peer, culprit);
                assert!(rank != culprit && reason.contains("No such file"), "{reason}");
            }
            other => panic!("{other:?}"),
        };
        by(broken.unwrap_err(), 0);
        by(refused.unwrap_err(), 1);
        assert_eq!(loaded.loaded, NAMES);
        assert_eq!([&loaded.missing, &loaded.unexpected, &loaded.ignored].map(|names| names.len()), [0; 3]);
        assert_eq!(now, values(&rank0));
    }
}

/// A rank fails between the last step and the save of the others.
#[test]
fn a_rank_that_failed_leaves_the_file_of_before() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("weights");
    ranks(2, |pg| {
        let weights = varmap(DType::F32);
        checkpoint::save_distributed(&pg, &weights, &file)?;
        if pg.rank() == 1 {
            pg.abort("it has failed");
            return Ok(());
        }
        fill(&weights, 2);
        match checkpoint::save_distributed(&pg, &weights, &file) {
            Err(Error::Group(Failure::PeerFailed { peer: 1, .. })) => Ok(()),
            other => panic!("{other:?}"),
        }
    });
    let loaded = varmap(DType::F32);
    fill(&loaded, 3);
    checkpoint::load(&loaded, &file).unwrap();
    assert_eq!(values(&loaded), values(&varmap(DType::F32)));
    assert_eq!(folder.path().read_dir().unwrap().count(), 1, "no temporary file is left");
}
