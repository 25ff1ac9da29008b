//! States that differ from rank to rank, and folders in which a run cannot begin.
use crate::common::{assert_error, going_on, ranks, try_ranks};
use candle_core::{DType, Device};
use candle_ddp::checkpoint::{Checkpointer, CheckpointerOptions, PerRank, RankZero, StateDict};
use candle_ddp::optim::{AdamW, ParamsAdamW};
use candle_ddp::seed::Generator;
use candle_ddp::{Error, ProcessGroup, Result};
use candle_nn::{Init, VarMap};
use std::collections::HashSet;
use std::path::Path;

fn new(pg: &ProcessGroup, folder: &Path) -> Result<Checkpointer> {
    Checkpointer::new(pg, folder, CheckpointerOptions::default())
}

fn draw(generator: &mut Generator, count: usize) -> Vec<u64> {
    (0..count).map(|_| generator.next_u64()).collect()
}

/// Each rank draws another number of times before the save, as with batches of different lengths.
#[test]
fn the_generator_of_each_rank_goes_on_where_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let undisturbed = ranks(3, |pg| {
        let mut noise = Generator::for_rank(7, pg.rank());
        let before = draw(&mut noise, 3 + 2 * pg.rank());
        new(&pg, folder.path())?.save(1, ("noise", &mut noise))?.wait()?;
        Ok((before, draw(&mut noise, 4)))
    });
    let resumed = |world_size| {
        ranks(world_size, |pg| {
            let mut noise = Generator::for_rank(0, pg.rank());
            assert_eq!(going_on(&pg, folder.path())?.load_latest(("noise", &mut noise))?, Some(1));
            assert_eq!(noise.seed(), 7);
            Ok(draw(&mut noise, 4))
        })
    };
    assert_eq!(resumed(3), undisturbed.iter().map(|(_, after)| after.clone()).collect::<Vec<_>>());
    // In a world of another size, no number is drawn twice.
    for world_size in [1, 2, 5] {
        let mut seen: HashSet<u64> = undisturbed.iter().flat_map(|(before, _)| before.clone()).collect();
        for number in resumed(world_size).concat() {
            assert!(seen.insert(number), "{number} of a world of {world_size} was drawn before");
        }
    }
}

#[test]
fn a_part_that_differs_is_an_error_that_names_part_and_ranks() {
    let folder = tempfile::tempdir().unwrap();
    ranks(4, |pg| {
        let mut checkpointer = new(&pg, folder.path())?;
        let mut varmap = VarMap::new();
        let value = if pg.rank() % 2 == 1 { pg.rank() as f64 } else { 0. };
        varmap.get(2, "fc.bias", Init::Const(value), DType::F32, &Device::Cpu)?;
        varmap.get(2, "fc.weight", Init::Const(1.), DType::F32, &Device::Cpu)?;
        let error = checkpointer.save(1, (("best", &mut 1.5), ("model", &mut varmap))).unwrap_err().to_string();
        assert!(error.contains("\"model\"") && error.contains("ranks 1, 3") && error.contains("fc.bias"), "{error}");
        assert!(!error.contains("fc.weight"), "{error}");
        let mut loss = pg.rank() as f64;
        assert_error(checkpointer.save(1, ("best", &mut loss)), &["\"best\"", "ranks 1, 2, 3"]);
        // The group is as good as before.
        checkpointer.save(1, ("best", &mut 1.5))?.wait()?;
        Ok(())
    });
}

#[test]
fn a_part_may_be_each_ranks_own_or_rank_zeros() {
    let folder = tempfile::tempdir().unwrap();
    ranks(3, |pg| {
        let mut parts =
            (PerRank(pg.rank() as f64), RankZero(pg.rank() as f64), PerRank(Generator::new(pg.rank() as u64)));
        parts.2.0.next_u64();
        let mut checkpointer = new(&pg, folder.path())?;
        checkpointer.save(1, (("own", &mut parts.0), ("first", &mut parts.1), ("noise", &mut parts.2)))?.wait()?;
        parts = (PerRank(7.), RankZero(7.), PerRank(Generator::new(7)));
        checkpointer.load_latest((("own", &mut parts.0), ("first", &mut parts.1), ("noise", &mut parts.2)))?;
        assert_eq!((parts.0.0, parts.1.0), (pg.rank() as f64, 0.));
        assert_eq!((parts.2.0.seed(), parts.2.0.offset()), (pg.rank() as u64, 1));
        Ok(())
    });
    let error = try_ranks(2, |pg| going_on(&pg, folder.path())?.load_latest(("own", &mut PerRank(0.)))).unwrap_err();
    let error = error.to_string();
    assert!(error.contains("\"own\"") && error.contains("each of 3 ranks"), "{error}");
}

#[test]
fn whole_checkpoints_are_listed_by_their_steps() {
    let folder = tempfile::tempdir().unwrap();
    ranks(2, |pg| {
        let options = CheckpointerOptions { keep: 9, resume: true, ..Default::default() };
        let mut checkpointer = Checkpointer::new(&pg, folder.path(), options)?;
        assert!(checkpointer.steps()?.is_empty());
        for step in [8, 30, 30, 200_000_000] {
            checkpointer.save(step, ("value", &mut (step as f64)))?;
        }
        assert_eq!(checkpointer.steps()?, [8, 30, 200_000_000]);
        if pg.rank() == 0 {
            std::fs::remove_file(folder.path().join("step-00000008/checkpoint.json")).unwrap();
            std::fs::create_dir(folder.path().join("step-00000009")).unwrap();
        }
        assert_eq!(checkpointer.steps()?, [30, 200_000_000]);
        Ok(())
    });
}

#[test]
fn a_run_from_scratch_does_not_begin_among_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    ranks(2, |pg| {
        let mut first = new(&pg, folder.path())?;
        assert_error(first.load_latest(("value", &mut 0.)), &["from scratch", "CheckpointerOptions::resume"]);
        first.save(3, ("value", &mut 1.5))?.wait()?;
        pg.barrier()?;
        let error = new(&pg, folder.path()).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("step-00000003") && text.contains("resume"), "{text}");
        match pg.rank() {
            0 => assert!(matches!(error, Error::InvalidArgument { .. }), "{error:?}"),
            _ => assert!(matches!(error, Error::RankFailed { rank: 0, .. }), "{error:?}"),
        }
        Ok(())
    });
}

#[test]
fn a_folder_that_cannot_be_used_is_an_error_at_once_on_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let (file, link) = (folder.path().join("file"), folder.path().join("link"));
    std::fs::write(&file, "").unwrap();
    std::os::unix::fs::symlink(folder.path().join("deep/missing"), &link).unwrap();
    // Not even root may write there.
    for (root, reason) in [(&*file, "file"), (&*link, "link"), (Path::new("/proc/checkpoints"), "/proc/checkpoints")] {
        ranks(2, |pg| {
            let error = new(&pg, root).unwrap_err();
            assert!(error.to_string().contains(reason), "{error}");
            let is_own = matches!(&error, Error::Io { .. });
            assert!(is_own || matches!(&error, Error::RankFailed { .. }), "{error:?}");
            pg.barrier()
        });
    }
    // The probe leaves nothing behind.
    let fresh = folder.path().join("deep/fresh");
    ranks(2, |pg| new(&pg, &fresh).map(drop));
    assert_eq!(fresh.read_dir().unwrap().count(), 0);
}

/// As on two hosts with different disks under one path.
#[test]
fn another_folder_than_rank_0s_is_an_error_on_all_ranks() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    ranks(3, |pg| {
        let error = new(&pg, folders[usize::from(pg.rank() == 2)].path()).unwrap_err();
        assert!(error.to_string().contains("is another folder than rank 0's"), "{error}");
        match pg.rank() {
            2 => assert!(matches!(error, Error::InvalidArgument { argument: "folder", .. }), "{error:?}"),
            _ => assert!(matches!(error, Error::RankFailed { rank: 2, .. }), "{error:?}"),
        }
        pg.barrier()
    });
    for folder in folders {
        assert_eq!(folder.path().read_dir().unwrap().count(), 0);
    }
}

#[test]
fn a_foreign_checkpoint_is_named_with_its_part() {
    let folder = tempfile::tempdir().unwrap();
    ranks(2, |pg| {
        let mut varmap = VarMap::new();
        varmap.get(2, "fc.bias", Init::Const(1.), DType::F32, &Device::Cpu)?;
        new(&pg, folder.path())?.save(3, (("model", &mut varmap), ("optimizer", &mut 2.5)))?.wait()?;
        let var = varmap.data().lock().unwrap()["fc.bias"].clone();
        let mut optimizer = AdamW::new(vec![("fc.bias".to_string(), var)], ParamsAdamW::default())?;
        let loaded = going_on(&pg, folder.path())?.load_latest(("optimizer", &mut optimizer));
        assert_error(loaded, &["step-00000003", "\"optimizer\"", "it must be the state of AdamW, not of f64"]);
        Ok(())
    });
}

#[test]
fn an_index_cannot_name_files_outside_of_its_folder() {
    let folder = tempfile::tempdir().unwrap();
    ranks(1, |pg| {
        new(&pg, folder.path())?.save(3, ("value", &mut 2.5))?.wait()?;
        let (inside, index) =
            (folder.path().join("step-00000003"), folder.path().join("step-00000003/checkpoint.json"));
        std::fs::copy(inside.join("value.safetensors"), folder.path().join("victim.safetensors")).unwrap();
        let bytes = std::fs::metadata(inside.join("value.safetensors")).unwrap().len();
        // In the format that has no hashes, which such a change would break.
        let write = |name: &str| {
            let part =
                format!(r#"{{"name": "value", "sharded": false, "files": [{{"name": "{name}", "bytes": {bytes}}}]}}"#);
            let text = format!(r#"{{"format": 1, "step": 3, "best": false, "world_size": 1, "parts": [{part}]}}"#);
            std::fs::write(&index, text).unwrap();
        };
        let mut value = 0.;
        write("../victim.safetensors");
        let refused = going_on(&pg, folder.path())?.load_latest(("value", &mut value));
        assert_error(refused, &["no other checkpoint to fall back to", "that no save writes"]);
        assert_eq!(value, 0.);
        // Such a checkpoint of an earlier version is read.
        write("value.safetensors");
        assert_eq!(going_on(&pg, folder.path())?.load_latest(("value", &mut value))?, Some(3));
        assert_eq!(value, 2.5);
        Ok(())
    });
}

#[test]
fn a_file_of_torch_save_is_no_state_of_an_optimizer_and_the_error_says_so() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/checkpoint.pt");
    let mut optimizer = AdamW::new(Vec::<candle_core::Var>::new(), ParamsAdamW::default()).unwrap();
    assert_error(optimizer.load(path), &["torch.save", "checkpoint.pt"]);
}
