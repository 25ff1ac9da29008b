//! Loading models from files of `torch.save`: which dict, and tensors that candle cannot have.
use candle_core::{DType, Device};
use candle_ddp_state::Error;
use candle_ddp_state::weights::{self, LoadOptions};
use candle_ddp_testing::torch_file::{archive, dict, floats_of, global, pickle, storage, tensor, text, untyped};
use candle_ddp_testing::{floats, var};
use candle_nn::{Init, VarMap};
use std::io::Write;

fn file(value: &[u8]) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&archive(&pickle(value), &storage())).unwrap();
    file
}

/// `_rebuild_tensor_v3` with arguments that are not known, uint16, complex numbers, and elements outside the storage.
#[test]
fn a_tensor_that_cannot_be_read_counts_only_where_it_is_wanted() {
    let v3 = [global("torch._utils\n_rebuild_tensor_v3"), b")R".to_vec()].concat();
    let uint16 = untyped("uint16", 0, &[2]);
    let complex = tensor("ComplexFloatStorage", 0, &[2], &[1], b"");
    let outside = tensor("FloatStorage", 4, &[1], &[1], b"");
    for (bad, words) in
        [(v3, "_rebuild_tensor_v3"), (uint16, "torch.uint16"), (complex, "ComplexFloatStorage"), (outside, "outside")]
    {
        let value = dict(&[("scale", &bad), ("w", &floats_of(2)), ("scale2", &bad)]);
        let file = file(&value);
        let varmap = |names: &[&str]| {
            let varmap = VarMap::new();
            for name in names {
                varmap.get(2, name, Init::Const(7.0), DType::F32, &Device::Cpu).unwrap();
            }
            varmap
        };
        let lenient = LoadOptions { strict: false, ..Default::default() };
        let fits = varmap(&["w"]);
        let report = weights::load_with(&fits, file.path(), lenient.clone()).unwrap();
        assert_eq!((report.loaded, report.unexpected), (vec!["w".into()], vec!["scale".into(), "scale2".into()]));
        assert_eq!(floats(&var(&fits, "w")), [0.0, 1.0]);
        let wants = varmap(&["scale2", "w"]);
        for (result, name) in [
            (weights::load_with(&wants, file.path(), lenient.clone()).map(|_| ()), "scale2: "),
            (weights::read(file.path()).map(|_| ()), "scale: "),
        ] {
            match result {
                Err(Error::CheckpointFile { reason, .. }) => {
                    assert!(reason.starts_with(name) && reason.contains(words), "{reason}");
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(floats(&var(&wants, "w")), [7.0, 7.0], "nothing has been loaded");
    }
}

/// `{"best": weights, "state_dict": weights}`: the second time a pickle only points to the first.
#[test]
fn a_dict_under_two_keys_is_found_under_both() {
    let dicts = [b"}".to_vec(), [&global("collections\nOrderedDict")[..], b")R"].concat()];
    for empty in dicts {
        let weights = [&empty[..], b"q\x05(", &text("a"), &floats_of(2), &text("b"), &floats_of(3), b"u"].concat();
        for keys in [["best", "state_dict"], ["state_dict", "best"]] {
            let file = file(&dict(&[(keys[0], &weights), (keys[1], b"h\x05")]));
            let tensors = weights::read(file.path()).unwrap();
            assert_eq!((floats(&tensors["a"]), floats(&tensors["b"])), (vec![0.0, 1.0], vec![0.0, 1.0, 2.0]));
            for key in keys {
                let varmap = VarMap::new();
                varmap.get(2, "a", Init::Const(7.0), DType::F32, &Device::Cpu).unwrap();
                let options = LoadOptions { strict: false, key: Some(key.to_string()), ..Default::default() };
                assert_eq!(weights::load_with(&varmap, file.path(), options).unwrap().loaded, ["a"]);
            }
        }
    }
    // A dict that holds itself.
    let own = [&b"}q\x05("[..], &text("w"), &floats_of(2), &text("own"), b"h\x05u"].concat();
    assert_eq!(weights::read(file(&own).path()).unwrap().len(), 1);
}
