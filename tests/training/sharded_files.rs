//! One file of a sharded model: each rank reads its pieces, from whole, damaged and crafted files, and all send theirs to write it.
use crate::common::{assert_error, pass_on_a_full_disk, ranks, sharded};
use candle_core::{DType, Device};
use candle_ddp::checkpoint::{self, LoadOptions, Pretrained};
use candle_ddp::nn::{Linear, linear};
use candle_ddp::{Block, DdpOptions, DistributedDataParallel, Error, ProcessGroup, Result, block};
use candle_nn::{VarBuilder, VarMap};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// A matrix of more than one part that is sent, and of several parts that are hashed.
const WIDTH: usize = 1 << 10;

fn net(widths: &'static [usize]) -> impl Fn(VarBuilder) -> candle_core::Result<Vec<Block<Linear>>> {
    move |vb: VarBuilder| {
        let one = |(index, width): (usize, &usize)| block(vb.pp(index), |vb| linear(3, *width, vb));
        widths.iter().enumerate().map(one).collect()
    }
}

const SMALL: &[usize] = &[5, 7];

fn made(pg: &ProcessGroup, varmap: &VarMap, widths: &'static [usize]) -> Result<impl Sized + use<>> {
    DistributedDataParallel::with_options(pg, varmap, net(widths), sharded())
}

/// This rank's elements.
fn values(varmap: &VarMap) -> BTreeMap<String, Vec<f32>> {
    let vars = varmap.data().lock().unwrap();
    let flat = |var: &candle_core::Var| var.flatten_all().unwrap().to_vec1().unwrap();
    vars.iter().map(|(name, var)| (name.clone(), flat(var))).collect()
}

/// A file of a small model, and its bytes.
fn file(folder: &Path) -> (std::path::PathBuf, Vec<u8>) {
    let path = folder.join("model.safetensors");
    let varmap = VarMap::new();
    net(SMALL)(VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu)).unwrap();
    checkpoint::save(&varmap, &path).unwrap();
    let bytes = fs::read(&path).unwrap();
    (path, bytes)
}

/// Ranks load the file `path` of each of them, which fails on all. Returns the errors.
fn refused(path: impl Fn(usize) -> std::path::PathBuf + Sync, options: LoadOptions) -> Vec<Error> {
    ranks(3, |pg| {
        let varmap = VarMap::new();
        let _ddp = made(&pg, &varmap, SMALL)?;
        let before = values(&varmap);
        let error = checkpoint::load_distributed(&pg, &varmap, path(pg.rank()), options.clone()).unwrap_err();
        assert_eq!(values(&varmap), before, "nothing is loaded");
        pg.barrier()?;
        Ok(error)
    })
}

fn is_file_error(error: &Error) -> bool {
    matches!(error, Error::CheckpointFile { .. } | Error::CheckpointMismatch { .. } | Error::RankFailed { .. })
}

#[test]
fn large_tensors_are_sent_in_parts_and_have_the_bytes_of_a_plain_save() {
    let folder = tempfile::tempdir().unwrap();
    let (plain, sharded) = (folder.path().join("plain"), folder.path().join("sharded"));
    // 12 MiB of one matrix, and matrices of no whole number of parts.
    const LARGE: &[usize] = &[WIDTH << 10, 5, 100_003];
    let varmap = VarMap::new();
    net(LARGE)(VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu)).unwrap();
    checkpoint::save(&varmap, &plain).unwrap();
    ranks(3, |pg| {
        let varmap = VarMap::new();
        let _ddp = made(&pg, &varmap, LARGE)?;
        checkpoint::load_distributed(&pg, &varmap, &plain, LoadOptions::default())?;
        let loaded = values(&varmap);
        checkpoint::save_distributed(&pg, &varmap, &sharded)?;
        // Without the other ranks.
        varmap.data().lock().unwrap().values().try_for_each(|var| var.set(&var.zeros_like()?))?;
        checkpoint::load(&varmap, &sharded)?;
        assert_eq!(values(&varmap), loaded);
        // A piece is a matrix of one row, which nobody takes for the whole.
        assert_eq!(varmap.data().lock().unwrap()["0.weight"].dims()[0], 1);
        assert_error(checkpoint::save(&varmap, folder.path().join("pieces")), &["save_distributed"]);
        Ok(())
    });
    assert!(fs::read(&plain).unwrap() == fs::read(&sharded).unwrap(), "the files differ");
}

#[test]
fn damaged_and_cut_files_are_errors_on_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let (path, bytes) = file(folder.path());
    let check = |bytes: &[u8], words: &str| {
        fs::write(&path, bytes).unwrap();
        for error in refused(|_| path.clone(), LoadOptions::default()) {
            assert!(is_file_error(&error) && error.to_string().contains(words), "{error}");
        }
    };
    // One bit of a value in each piece, wherever it is: some rank reads it.
    let data = bytes.len() - 4 * (4 * 5 + 4 * 7);
    for at in (data..bytes.len()).step_by(17) {
        let mut damaged = bytes.clone();
        damaged[at] ^= 4;
        check(&damaged, "hash");
    }
    check(&bytes[..bytes.len() - 1], "is it complete?");
    check(&bytes[..data / 2], "too long");
    check(b"", "empty");
    check(b"PK\x03\x04", "complete");
    let shape = bytes.windows(5).position(|window| window == b"[5,3]").unwrap();
    let mut crafted = bytes.clone();
    crafted[shape..shape + 5].copy_from_slice(b"[3,5]");
    check(&crafted, "f32[3, 5] in the file");
    crafted[shape..shape + 5].copy_from_slice(b"[9,9]");
    check(&crafted, "damaged");
}

/// What no rank needs is read to be checked, by one of them.
#[test]
fn skipped_tensors_are_checked_as_well() {
    let folder = tempfile::tempdir().unwrap();
    let (path, mut bytes) = file(folder.path());
    let options = LoadOptions { skip: std::sync::Arc::new(|name| name.starts_with("1.")), ..Default::default() };
    let loaded = ranks(3, |pg| {
        let varmap = VarMap::new();
        let _ddp = made(&pg, &varmap, SMALL)?;
        checkpoint::load_distributed(&pg, &varmap, &path, options.clone())
    });
    assert!(loaded.iter().all(|report| report.loaded == ["0.bias", "0.weight"] && report.skipped.len() == 2));
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
    for error in refused(|_| path.clone(), options) {
        assert!(error.to_string().contains("hash"), "{error}");
    }
}

#[test]
fn ranks_with_different_files_are_told_so() {
    let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (first, second) = (file(one.path()).0, file(other.path()).0);
    let path = |rank| if rank == 2 { second.clone() } else { first.clone() };
    for error in refused(path, LoadOptions::default()) {
        assert!(error.to_string().contains("rank 2 has another file of this name than rank 0"), "{error}");
    }
    // A copy that is damaged where rank 2 reads its piece, and where another rank does.
    let bytes = fs::read(&first).unwrap();
    for at in [bytes.len() - 1, bytes.len() - 4 * (4 * 5 + 4 * 7)] {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1;
        fs::write(&second, damaged).unwrap();
        for error in refused(path, LoadOptions::default()) {
            assert!(error.to_string().contains("damaged"), "{error}");
        }
    }
    fs::remove_file(&second).unwrap();
    for error in refused(path, LoadOptions::default()) {
        assert!(error.to_string().contains("No such file"), "{error}");
    }
}

#[test]
fn other_models_are_errors_on_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let (path, _) = file(folder.path());
    const OTHERS: [&[usize]; 2] = [&[5], &[5, 8]];
    for (others, words) in OTHERS
        .into_iter()
        .zip(["not in the model (2): 1.bias, 1.weight", "f32[7, 3] in the file, f32[8, 3] in the model"])
    {
        let errors = ranks(2, |pg| {
            let varmap = VarMap::new();
            let _ddp = made(&pg, &varmap, others)?;
            Ok(checkpoint::load_distributed(&pg, &varmap, &path, LoadOptions::default()).unwrap_err())
        });
        for error in errors {
            assert!(matches!(error, Error::CheckpointMismatch { .. }) && error.to_string().contains(words), "{error}");
        }
    }
    // Files of several, with an index, are read in the same way.
    ranks(2, |pg| {
        let varmap = VarMap::new();
        let _ddp = made(&pg, &varmap, SMALL)?;
        let error = checkpoint::load_distributed(&pg, &varmap, folder.path().join("none"), LoadOptions::default());
        assert!(matches!(error, Err(Error::Io { .. })), "{error:?}");
        checkpoint::load_distributed(&pg, &varmap, folder.path(), LoadOptions::default()).map(drop)
    });
}

#[test]
fn hugging_faces_folders_are_written_from_pieces_and_read_into_them() {
    // The tensors have 20, 60, 28 and 84 bytes.
    for (is_sharded, size, files) in [(true, 64, 4), (false, 120, 2), (true, 1 << 20, 1)] {
        let mut names: Vec<_> = (1..=files).map(|file| format!("model-{file:05}-of-{files:05}.safetensors")).collect();
        names.push("model.safetensors.index.json".to_string());
        if files == 1 {
            names = vec!["model.safetensors".to_string()];
        }
        let last = names.last().unwrap();
        let folder = tempfile::tempdir().unwrap();
        ranks(3, |pg| {
            let (varmap, read) = (VarMap::new(), VarMap::new());
            let options = if is_sharded { sharded() } else { DdpOptions::default() };
            let _ddp = DistributedDataParallel::with_options(&pg, &varmap, net(SMALL), options)?;
            let missing = checkpoint::save_pretrained(&pg, &varmap, folder.path().join("missing"), size);
            assert!(missing.unwrap_err().to_string().contains("create the folder first"));
            checkpoint::save_pretrained(&pg, &varmap, folder.path(), size)?;
            assert_error(checkpoint::save_pretrained(&pg, &varmap, folder.path(), size), &["it must have no model"]);
            let _read = made(&pg, &read, SMALL)?;
            checkpoint::load_distributed(&pg, &read, folder.path(), LoadOptions::default())?;
            if is_sharded {
                assert_eq!(values(&read), values(&varmap));
            }
            // Another half of each weight is elsewhere.
            read.data().lock().unwrap().values().try_for_each(|var| var.set(&var.zeros_like()?))?;
            checkpoint::load(&read, folder.path().join(last))?;
            let whole = Pretrained::open(folder.path())?.read("1.weight")?.flatten_all()?.to_vec1::<f32>()?;
            let piece = &values(&read)["1.weight"];
            assert!(whole.windows(piece.len().max(1)).any(|window| piece.is_empty() || window == &piece[..]));
            Ok(())
        });
        let mut found: Vec<_> = folder.path().read_dir().unwrap().map(|entry| entry.unwrap().file_name()).collect();
        found.sort();
        assert_eq!(found, names.iter().map(std::ffi::OsString::from).collect::<Vec<_>>());
    }
}

/// A save whose ranks do not have the same model, or whose folder is missing, is an error on all ranks, and they can go on.
#[test]
fn saves_that_cannot_be_are_errors_on_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    ranks(3, |pg| {
        let (varmap, other) = (VarMap::new(), VarMap::new());
        let _ddp = made(&pg, &varmap, SMALL)?;
        let _other = made(&pg, &other, &[5])?;
        let path = folder.path().join("file");
        let own = if pg.rank() == 1 { &other } else { &varmap };
        match checkpoint::save_distributed(&pg, own, &path) {
            Err(Error::Mismatch { what: "model", rank: 1, difference }) => {
                assert!(difference.contains("1.bias"), "{difference}");
            }
            other => panic!("{other:?}"),
        }
        let error = checkpoint::save_distributed(&pg, &varmap, folder.path().join("missing").join("file")).unwrap_err();
        assert!(error.to_string().contains("create the folder first"), "{error}");
        assert_eq!(matches!(error, Error::Io { .. }), pg.rank() == 0, "{error:?}");
        checkpoint::save_distributed(&pg, &varmap, &path)
    });
    assert_eq!(folder.path().read_dir().unwrap().count(), 1);
}

/// Runs itself in a process that may not write large files, as on a full disk.
#[test]
fn a_full_disk_is_an_error_on_all_ranks_and_leaves_the_old_file() {
    const FOLDER: &str = "CANDLE_DDP_TEST_FULL_DISK";
    // 12 MiB, of which rank 0 has a third.
    const LARGE: &[usize] = &[WIDTH << 10];
    if let Some(folder) = std::env::var_os(FOLDER) {
        let errors = ranks(3, |pg| {
            let varmap = VarMap::new();
            let _ddp = made(&pg, &varmap, LARGE)?;
            let error = checkpoint::save_distributed(&pg, &varmap, Path::new(&folder).join("file")).unwrap_err();
            pg.barrier()?;
            Ok(error)
        });
        for (rank, error) in errors.into_iter().enumerate() {
            let is_right = if rank == 0 {
                matches!(error, Error::Io { .. })
            } else {
                matches!(error, Error::RankFailed { rank: 0, .. })
            };
            assert!(is_right && error.to_string().contains("writing"), "{error:?}");
        }
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "old").unwrap();
    pass_on_a_full_disk(
        18432,
        module_path!(),
        "a_full_disk_is_an_error_on_all_ranks_and_leaves_the_old_file",
        (FOLDER, folder.path()),
    );
    assert_eq!(fs::read(&file).unwrap(), b"old");
    assert_eq!(folder.path().read_dir().unwrap().count(), 1, "no temporary file is left");
}
