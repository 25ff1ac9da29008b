//! Checkpoints as files: dtypes that candle does not have, and the folder before and after writing.
use candle_core::{DType, Device, Tensor};
use candle_ddp_state::Error;
use candle_ddp_state::weights::{self, LoadOptions};
use candle_ddp_testing::{assert_error, floats, pass_on_a_full_disk, peak_memory, test_process, var};
use candle_nn::{Init, VarMap};
use std::collections::HashMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// A safetensors file of tensors of one byte per element: their names, dtypes and values.
fn safetensors(path: &Path, tensors: &[(&str, &str, &[u8])]) {
    let (mut header, mut data) = (Vec::new(), Vec::new());
    for (name, dtype, values) in tensors {
        let (start, end) = (data.len(), data.len() + values.len());
        let shape = values.len();
        header
            .push(format!("\"{name}\":{{\"dtype\":\"{dtype}\",\"shape\":[{shape}],\"data_offsets\":[{start},{end}]}}"));
        data.extend_from_slice(values);
    }
    let header = format!("{{{}}}", header.join(","));
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
    fs::write(path, bytes).unwrap();
}

fn zeros(names: &[&str], dtype: DType) -> VarMap {
    let varmap = VarMap::new();
    for name in names {
        varmap.get(2, name, Init::Const(0.0), dtype, &Device::Cpu).unwrap();
    }
    varmap
}

fn twice(value: f32) -> HashMap<String, Tensor> {
    HashMap::from([("w".to_string(), Tensor::new(&[value, value], &Device::Cpu).unwrap())])
}

/// `PK`, with which zip archives begin, is also a length of a safetensors header.
#[test]
fn safetensors_that_begin_like_a_zip_archive_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let (file, name) = (folder.path().join("weights"), "a".repeat(19152));
    let tensors = HashMap::from([(name.clone(), Tensor::new(&[1f32, 2.0], &Device::Cpu).unwrap())]);
    weights::save_tensors(&tensors, &file).unwrap();
    assert!(fs::read(&file).unwrap().starts_with(b"PK"));
    assert_eq!(floats(&weights::read(&file).unwrap()[&name]), [1.0, 2.0]);
}

#[test]
fn a_dtype_that_candle_lacks_counts_only_where_it_is_wanted() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("weights");
    safetensors(&file, &[("mask", "BOOL", &[1, 0]), ("w", "U8", &[3, 4]), ("z", "I8", &[5, 6]), ("y", "I8", &[7])]);
    let refused = |result: Result<(), Error>, name: &str| match result {
        Err(error @ Error::CheckpointFile { .. }) => {
            let text = error.to_string();
            assert!(text.contains(&format!("{name}: candle has no dtype for I8")), "{text}");
            assert!(text.contains(file.to_str().unwrap()), "{text}");
        }
        other => panic!("{other:?}"),
    };
    let varmap = zeros(&["mask", "w"], DType::U8);
    let lenient = LoadOptions { strict: false, ..Default::default() };
    let report = weights::load_with(&varmap, &file, lenient.clone()).unwrap();
    assert_eq!((report.loaded, report.unexpected), (vec!["mask".into(), "w".into()], vec!["y".into(), "z".into()]));
    assert_eq!(var(&varmap, "mask").to_vec1::<u8>().unwrap(), [1, 0]);
    assert_eq!(var(&varmap, "w").to_vec1::<u8>().unwrap(), [3, 4]);
    // Strict: it is too many, like any other.
    match weights::load(&varmap, &file) {
        Err(Error::CheckpointMismatch { unexpected, .. }) => assert_eq!(unexpected, ["y", "z"]),
        other => panic!("{other:?}"),
    }
    let wants = zeros(&["w", "z"], DType::U8);
    refused(weights::load_with(&wants, &file, lenient).map(|_| ()), "z");
    assert_eq!(var(&wants, "w").to_vec1::<u8>().unwrap(), [0, 0], "nothing has been loaded");
    refused(weights::read(&file).map(|_| ()), "y");
}

#[test]
fn shapes_that_overflow_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("weights");
    let header = br#"{"w":{"dtype":"F32","shape":[0,1099511627776,1099511627776],"data_offsets":[0,0]}}"#;
    fs::write(&file, [&(header.len() as u64).to_le_bytes()[..], header].concat()).unwrap();
    assert_error(weights::read(&file), &["w: its shape"]);
}

#[test]
fn a_file_that_is_there_keeps_its_permissions() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("weights");
    for mode in [0o600, 0o640, 0o666] {
        fs::write(&file, "").unwrap();
        fs::set_permissions(&file, Permissions::from_mode(mode)).unwrap();
        weights::save_tensors(&twice(1.0), &file).unwrap();
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o7777, mode);
        assert_eq!(floats(&weights::read(&file).unwrap()["w"]), [1.0, 1.0]);
    }
}

#[test]
fn symbolic_links_are_written_through() {
    let folder = tempfile::tempdir().unwrap();
    let (links, files) = (folder.path().join("links"), folder.path().join("files"));
    fs::create_dir(&links).unwrap();
    fs::create_dir(&files).unwrap();
    fs::write(files.join("weights"), "").unwrap();
    symlink(files.join("weights"), links.join("absolute")).unwrap();
    symlink("../files/weights", links.join("relative")).unwrap();
    symlink("relative", links.join("twice")).unwrap();
    symlink("../files/new", links.join("dangling")).unwrap();
    for (value, (link, file)) in
        [("absolute", "weights"), ("relative", "weights"), ("twice", "weights"), ("dangling", "new")]
            .into_iter()
            .enumerate()
    {
        weights::save_tensors(&twice(value as f32), links.join(link)).unwrap();
        assert!(fs::symlink_metadata(links.join(link)).unwrap().is_symlink(), "{link}");
        assert!(!fs::symlink_metadata(files.join(file)).unwrap().is_symlink());
        assert_eq!(floats(&weights::read(files.join(file)).unwrap()["w"]), [value as f32; 2], "{link}");
    }
    symlink("circle", links.join("circle")).unwrap();
    match weights::save_tensors(&twice(1.0), links.join("circle")) {
        Err(error @ Error::Io { .. }) => assert!(error.to_string().contains("circle"), "{error}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(links.read_dir().unwrap().count(), 5, "no temporary file is left");
    assert_eq!(files.read_dir().unwrap().count(), 2, "no temporary file is left");
}

/// As long a name as file systems allow.
#[test]
fn names_may_be_long() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("w".repeat(255));
    weights::save_tensors(&twice(1.0), &file).unwrap();
    assert_eq!(floats(&weights::read(&file).unwrap()["w"]), [1.0, 1.0]);
}

/// A folder or a device is not replaced by a file.
#[test]
fn what_is_no_regular_file_stays() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    match weights::save_tensors(&twice(1.0), &socket) {
        Err(error @ Error::Io { .. }) => assert!(error.to_string().contains("not a regular file"), "{error}"),
        other => panic!("{other:?}"),
    }
    assert!(!fs::metadata(&socket).unwrap().is_file());
    assert_eq!(folder.path().read_dir().unwrap().count(), 1);
}

#[test]
fn a_file_that_cannot_be_written_leaves_the_old_one() {
    let folder = tempfile::tempdir().unwrap();
    let varmap = zeros(&["w"], DType::F32);
    let io = |path: &Path| match weights::save(&varmap, path) {
        Err(error @ Error::Io { .. }) => assert!(error.to_string().contains(path.to_str().unwrap()), "{error}"),
        other => panic!("{other:?}"),
    };
    // A folder has the name that the file should get.
    let taken = folder.path().join("taken");
    std::fs::create_dir(&taken).unwrap();
    io(&taken);
    io(&folder.path().join("missing").join("file"));
    assert_eq!(folder.path().read_dir().unwrap().count(), 1);
    assert!(matches!(weights::save(&varmap, "/"), Err(Error::InvalidArgument { argument: "path", .. })));
}

/// Runs itself in a process that may not write files of more than a few blocks, as on a full disk.
#[test]
fn a_full_disk_leaves_the_old_file() {
    const FILE: &str = "CANDLE_DDP_TEST_FULL_DISK";
    let big = |value: f32| HashMap::from([("w".to_string(), Tensor::full(value, 50_000, &Device::Cpu).unwrap())]);
    if let Some(file) = std::env::var_os(FILE) {
        match weights::save_tensors(&big(2.0), &file) {
            Err(error @ Error::Io { .. }) => assert!(error.to_string().contains("writing"), "{error}"),
            other => panic!("{other:?}"),
        }
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("weights");
    weights::save_tensors(&big(1.0), &file).unwrap();
    pass_on_a_full_disk(16, module_path!(), "a_full_disk_leaves_the_old_file", (FILE, &file));
    assert_eq!(floats(&weights::read(&file).unwrap()["w"]), vec![1.0; 50_000]);
    assert_eq!(folder.path().read_dir().unwrap().count(), 1, "no temporary file is left");
}

/// Runs itself in a process that saves again and again, and is killed while it does.
#[test]
fn a_save_that_is_killed_leaves_the_old_file_and_the_next_one_cleans_up() {
    const FILE: &str = "CANDLE_DDP_TEST_KILLED_SAVE";
    const ELEMENTS: usize = 4 << 20;
    let big = |value: f32| HashMap::from([("w".to_string(), Tensor::full(value, ELEMENTS, &Device::Cpu).unwrap())]);
    if let Some(file) = std::env::var_os(FILE) {
        // Until it is killed; if the test has failed, until the folder is gone.
        for number in 1.. {
            weights::save_tensors(&big(number as f32), &file).unwrap();
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("weights");
    weights::save_tensors(&big(0.0), &file).unwrap();
    let entries = || folder.path().read_dir().unwrap().count();
    let deadline = Instant::now() + Duration::from_secs(180);
    // It may be killed just after it has renamed its file.
    while entries() == 1 {
        let name = "a_save_that_is_killed_leaves_the_old_file_and_the_next_one_cleans_up";
        let mut child = test_process(module_path!(), name).env(FILE, &file).stdout(Stdio::null()).spawn().unwrap();
        while entries() == 1 {
            assert!(Instant::now() < deadline, "nothing is saved");
            std::thread::sleep(Duration::from_millis(1));
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
    assert_eq!(entries(), 2, "the file, and what the process that was killed has left");
    let found = floats(&weights::read(&file).unwrap()["w"]);
    assert_eq!(found.len(), ELEMENTS);
    assert!(found.iter().all(|value| *value == found[0]), "the file is one that was saved, as a whole");
    weights::save_tensors(&twice(7.0), &file).unwrap();
    assert_eq!(entries(), 1);
    assert_eq!(floats(&weights::read(&file).unwrap()["w"]), [7.0, 7.0]);
}

#[test]
fn reading_takes_little_more_memory_than_the_tensors() {
    const FILE: &str = "CANDLE_DDP_TEST_READ";
    if let Some(file) = std::env::var_os(FILE) {
        let (peak, length) = (peak_memory(|| weights::read(&file).unwrap()), fs::metadata(&file).unwrap().len());
        assert!(peak < length + length / 3, "{peak} bytes for a file of {length}");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("weights");
    let tensor = |_| Tensor::full(1f32, 4 << 20, &Device::Cpu).unwrap();
    weights::save_tensors(&(0..3).map(|number| (number.to_string(), tensor(number))).collect(), &file).unwrap();
    let child = test_process(module_path!(), "reading_takes_little_more_memory_than_the_tensors")
        .env(FILE, &file)
        .output()
        .unwrap();
    assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stderr));
}
