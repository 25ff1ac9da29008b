//! Pretrained weights in one file and in several, also damaged and crafted ones.
use candle_core::{DType, Device, Tensor, Var};
use candle_ddp_nn::{linear, linear_no_bias};
use candle_ddp_state::weights::{self, LoadOptions, Pretrained};
use candle_ddp_state::{Error, Result};
use candle_ddp_testing::{floats, peak_memory, succeed, test_process};
use candle_nn::VarMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

fn write(path: &Path, tensors: &[(&str, f32)]) {
    let tensors =
        tensors.iter().map(|(name, value)| (name.to_string(), Tensor::new(&[*value, *value], &Device::Cpu).unwrap()));
    weights::save_tensors(&tensors.collect(), path).unwrap();
}

/// A folder with two files and this text in the place of the map from tensors to files.
fn folder(map: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    write(&folder.path().join("one"), &[("a", 1.0), ("b", 2.0)]);
    write(&folder.path().join("two"), &[("c", 3.0)]);
    let text = format!("{{\"metadata\": {{\"total_size\": 1}}, \"weight_map\": {map}}}");
    fs::write(folder.path().join("model.safetensors.index.json"), text).unwrap();
    folder
}

const RIGHT: &str = r#"{"a": "one", "b": "one", "c": "two"}"#;

fn reason(result: Result<impl Sized>) -> String {
    match result.map(|_| ()) {
        Err(Error::CheckpointFile { reason, .. }) => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn tensors_are_read_from_several_files_or_from_one() {
    let several = folder(RIGHT);
    let index = several.path().join("model.safetensors.index.json");
    for path in [several.path(), &index] {
        let pretrained = Pretrained::open(path).unwrap();
        assert_eq!(pretrained.names().collect::<Vec<_>>(), ["a", "b", "c"]);
        assert_eq!(["a", "b", "c"].map(|name| floats(&pretrained.read(name).unwrap())[0]), [1.0, 2.0, 3.0]);
        assert_eq!(reason(pretrained.read("d")), "there is no tensor d");
    }
    let single = tempfile::tempdir().unwrap();
    assert!(reason(Pretrained::open(single.path())).contains("neither model.safetensors.index.json nor"));
    let file = single.path().join("model.safetensors");
    let (weight, bias) = (Tensor::ones((2, 3), DType::F32, &Device::Cpu), Tensor::ones(2, DType::F32, &Device::Cpu));
    let tensors = [("fc.weight".to_string(), weight.unwrap()), ("fc.bias".to_string(), bias.unwrap())];
    weights::save_tensors(&tensors.into(), &file).unwrap();
    for path in [single.path(), &file] {
        let vb = Pretrained::open(path).unwrap().var_builder(DType::BF16, &Device::Cpu);
        assert!(vb.contains_tensor("fc.weight") && !vb.contains_tensor("fc"));
        let layer = linear(3, 2, vb.pp("fc")).unwrap();
        assert_eq!((layer.weight().dtype(), layer.weight().is_variable()), (DType::BF16, false));
        let wrong = linear(2, 3, vb.pp("fc")).map(|_| ()).map_err(Error::from);
        assert_eq!(reason(wrong), "fc.weight is bf16[2, 3], and the model needs the shape [3, 2]");
        assert_eq!(reason(vb.get(1, "fc.other").map_err(Error::from)), "there is no tensor fc.other");
    }
}

#[test]
fn a_crafted_index_is_an_error() {
    let open = |map: &str| reason(Pretrained::open(folder(map).path()));
    let expect = |map: &str, text: &str| {
        let reason = open(map);
        assert!(reason.contains(text), "{reason}");
    };
    expect(r#"{"a": "one", "b": "one", "c": "three"}"#, "c is in three, which does not exist");
    expect(r#"{"a": "one", "b": "one", "c": "one"}"#, "c is in one, which does not have it");
    expect(r#"{"a": "one", "b": "two", "c": "two"}"#, "b is in two, but one has it as well or instead");
    expect(r#"{"a": "one", "b": "one", "c": "two", "a": "two"}"#, "it lists a twice");
    for outside in ["../one", "/etc/passwd", "folder/one", "./one", "..", ".", "", "one/"] {
        let reason = open(&format!(r#"{{"a": "{outside}"}}"#));
        assert!(reason.contains("a file must be in the folder of the index"), "{outside}: {reason}");
    }
    for map in ["[]", "3", "{\"a\": 1}", "{"] {
        expect(map, "it is not an index of safetensors files");
    }
    // The same tensor in two files.
    let twice = folder(RIGHT);
    write(&twice.path().join("two"), &[("c", 3.0), ("a", 5.0)]);
    assert!(
        reason(Pretrained::open(twice.path())).contains("it says that a is in one, but two has it as well or instead")
    );
    fs::write(twice.path().join("model.safetensors.index.json"), r#"{"weight_map": {"b": "one", "c": "two"}}"#)
        .unwrap();
    assert!(reason(Pretrained::open(twice.path())).starts_with("a is in one, but two has it as well or instead"));
}

/// The files count, and not the index. The options of a load decide about names that only the model or only the files have.
#[test]
fn an_index_may_list_other_tensors_than_its_files_have() {
    let fewer = folder(r#"{"a": "one", "c": "two"}"#);
    assert_eq!(Pretrained::open(fewer.path()).unwrap().names().collect::<Vec<_>>(), ["a", "b", "c"]);
    assert_eq!(weights::read(fewer.path()).unwrap().len(), 3);
    let more = folder(r#"{"a": "one", "b": "one", "c": "two", "d": "two"}"#);
    for reason in [reason(Pretrained::open(more.path())), reason(weights::read(more.path()))] {
        assert!(reason.contains("it says that d is in two, which does not have it"), "{reason}");
    }
    let varmap = |names: &[&str]| {
        let vars = names.iter().map(|name| (name.to_string(), Var::zeros(2, DType::F32, &Device::Cpu).unwrap()));
        let varmap = VarMap::new();
        varmap.data().lock().unwrap().extend(vars);
        varmap
    };
    let lenient = || LoadOptions { strict: false, ..Default::default() };
    for (folder, names) in [(&fewer, &["a", "b", "c"][..]), (&more, &["a", "b", "c"])] {
        let varmap = varmap(names);
        weights::load(&varmap, folder.path()).unwrap();
        assert_eq!(floats(&varmap.data().lock().unwrap()["b"]), [2.0; 2]);
    }
    let error = weights::load(&varmap(&["a", "b", "c", "d"]), more.path()).unwrap_err();
    assert!(matches!(&error, Error::CheckpointMismatch { missing, .. } if missing == &["d"]), "{error:?}");
    let report = weights::load_with(&varmap(&["a", "b", "c", "d"]), more.path(), lenient()).unwrap();
    assert_eq!((report.loaded.len(), report.missing), (3, vec!["d".to_string()]));
    let error = weights::load(&varmap(&["a", "c"]), fewer.path()).unwrap_err();
    assert!(matches!(&error, Error::CheckpointMismatch { unexpected, .. } if unexpected == &["b"]), "{error:?}");
    let ignored = LoadOptions { ignored: Arc::new(|name| name == "b"), ..Default::default() };
    weights::load_with(&varmap(&["a", "c"]), fewer.path(), ignored).unwrap();
}

#[test]
fn an_index_and_another_single_file_are_two_models() {
    let both = folder(RIGHT);
    write(&both.path().join("model.safetensors"), &[("a", 4.0), ("b", 5.0), ("c", 6.0)]);
    let varmap = VarMap::new();
    for reason in [
        reason(Pretrained::open(both.path())),
        reason(weights::read(both.path())),
        reason(weights::load(&varmap, both.path())),
    ] {
        assert!(reason.contains("the folder also has model.safetensors, which the index does not list"), "{reason}");
    }
    for (name, value) in [("model.safetensors", 4.0), ("model.safetensors.index.json", 1.0)] {
        let pretrained = Pretrained::open(both.path().join(name)).unwrap();
        assert_eq!(floats(&pretrained.read("a").unwrap())[0], value);
    }
    let listed = r#"{"weight_map": {"a": "model.safetensors", "b": "model.safetensors", "c": "model.safetensors"}}"#;
    fs::write(both.path().join("model.safetensors.index.json"), listed).unwrap();
    assert_eq!(floats(&Pretrained::open(both.path()).unwrap().read("a").unwrap())[0], 4.0);
}

#[test]
fn sizes_that_lie_are_errors() {
    let cut = folder(RIGHT);
    let file = cut.path().join("two");
    let bytes = fs::read(&file).unwrap();
    let refused = |bytes: &[u8], text: &str| {
        fs::write(&file, bytes).unwrap();
        let reason = reason(Pretrained::open(cut.path()));
        assert!(reason.contains(text), "{reason}");
    };
    refused(&bytes[..bytes.len() - 1], "is it complete?");
    refused(&[&bytes[..], &[0]].concat(), "is it complete?");
    refused(&[&u64::MAX.to_le_bytes(), &bytes[8..]].concat(), "which is too long");
    let mut shape = bytes.clone();
    let at = shape.windows(3).position(|three| three == b"[2]").unwrap();
    shape[at + 1] = b'9';
    refused(&shape, "its header is damaged");
    refused(b"", "its header is too short");
}

/// Each weight is in memory once, and the file is not.
#[test]
fn a_model_is_in_memory_once() {
    succeed(&mut test_process(module_path!(), "memory_process"));
}

#[test]
#[ignore = "started by other tests"]
fn memory_process() {
    const LAYERS: usize = 32;
    let folder = tempfile::tempdir().unwrap();
    for index in 0..LAYERS {
        let weight = Tensor::ones((1 << 10, 1 << 10), DType::F32, &Device::Cpu).unwrap();
        let file = folder.path().join(index.to_string());
        weights::save_tensors(&[(format!("{index}.weight"), weight)].into(), file).unwrap();
    }
    let map: Vec<String> = (0..LAYERS).map(|index| format!("\"{index}.weight\": \"{index}\"")).collect();
    let index = format!("{{\"weight_map\": {{{}}}}}", map.join(","));
    fs::write(folder.path().join("model.safetensors.index.json"), index).unwrap();
    let length = LAYERS << 22;
    let peak = peak_memory(|| {
        let vb = Pretrained::open(folder.path()).unwrap().var_builder(DType::F32, &Device::Cpu);
        (0..LAYERS).map(|index| linear_no_bias(1 << 10, 1 << 10, vb.pp(index)).unwrap()).collect::<Vec<_>>()
    });
    assert!(peak < length as u64 * 5 / 4, "{peak} bytes for {length} bytes of weights");
}
