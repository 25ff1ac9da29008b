use super::*;
use candle_core::{Device, Tensor};
use std::collections::HashMap;
use std::ffi::OsStr;

/// Of the state of an optimizer, everything is wanted.
#[test]
fn a_tensor_that_cannot_be_read_is_named() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let header = br#"{"b":{"dtype":"I8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"BOOL","shape":[1],"data_offsets":[1,2]}}"#;
    std::fs::write(&file, [&(header.len() as u64).to_le_bytes()[..], header, &[7, 1]].concat()).unwrap();
    match read_safetensors(file.path()) {
        Err(Error::InvalidArgument { argument: "path", reason }) => {
            assert_eq!(reason, format!("{}: b: candle has no dtype for I8", file.path().display()));
        }
        other => panic!("{other:?}"),
    }
}

fn tensors(value: f32) -> HashMap<String, Tensor> {
    HashMap::from([("w".to_string(), Tensor::new(&[value], &Device::Cpu).unwrap())])
}

fn value(path: &Path) -> f32 {
    read_safetensors(path).unwrap()["w"].to_vec1().unwrap()[0]
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        folder.read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn only_a_commit_changes_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("w");
    let prepare = |value| WriteJob::new(&path, &tensors(value)).unwrap().run(&Progress::default()).unwrap();
    drop(prepare(1.0));
    assert!(names(folder.path()).is_empty());
    prepare(2.0).commit().unwrap();
    let prepared = prepare(3.0);
    assert_eq!(value(&path), 2.0);
    assert_eq!(names(folder.path()).len(), 2);
    drop(prepared);
    assert_eq!((value(&path), names(folder.path())), (2.0, vec!["w".to_string()]));
}

#[test]
fn leftovers_are_removed_and_what_is_being_written_stays() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("w");
    // A leftover, and names that others have given.
    let others =
        [".w.0123456789abcde.tmp", ".w.0123456789abcdef", ".w2.0123456789abcdef.tmp", "w.0123456789abcdef.tmp"];
    for name in others.iter().chain(&[".w.0123456789abcdef.tmp"]) {
        std::fs::write(folder.path().join(name), "left").unwrap();
    }
    std::fs::create_dir(folder.path().join(".w.1123456789abcdef.tmp")).unwrap();
    let live = WriteJob::new(&path, &tensors(1.0)).unwrap().run(&Progress::default()).unwrap();
    let temporary = live.temporary.file_name().unwrap().to_str().unwrap().to_string();
    write_safetensors(&path, &tensors(2.0)).unwrap();
    assert_eq!(value(&path), 2.0);
    let mut expected: Vec<_> = others.iter().map(|name| name.to_string()).collect();
    expected.extend(["w".to_string(), temporary, ".w.1123456789abcdef.tmp".to_string()]);
    expected.sort();
    assert_eq!(names(folder.path()), expected);
    live.commit().unwrap();
    assert_eq!(value(&path), 1.0);
}

/// Many at once, each of which looks for leftovers while others begin.
#[test]
fn writes_to_one_target_do_not_disturb_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("w");
    std::thread::scope(|scope| {
        for number in 0..4 {
            let path = &path;
            scope.spawn(move || (0..25).for_each(|_| write_safetensors(path, &tensors(number as f32)).unwrap()));
        }
    });
    assert!(value(&path) < 4.0);
    assert_eq!(names(folder.path()), ["w"]);
}

#[test]
fn a_write_that_is_called_off_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("w");
    let progress = Progress::default();
    progress.cancel();
    let error = WriteJob::new(&path, &tensors(1.0)).unwrap().run(&progress).unwrap_err().to_string();
    assert!(error.contains("called off"), "{error}");
    assert!(names(folder.path()).is_empty());
}

#[test]
fn long_names_are_cut_between_characters() {
    let prefix = temporary::prefix;
    assert_eq!(prefix(OsStr::new("model.safetensors")), ".model.safetensors.");
    assert_eq!(prefix(OsStr::new(&"x".repeat(255))).len(), 102);
    assert_eq!(prefix(OsStr::new(&format!("x{}", "é".repeat(120)))), format!(".x{}.", "é".repeat(49)));
}
