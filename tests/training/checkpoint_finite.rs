//! Infinities and NaNs in checkpoints: the last finite one stays and is loaded.
use crate::common::{going_on, ranks};
use candle_core::{DType, Device, Tensor, Var};
use candle_ddp::checkpoint::{Checkpointer, CheckpointerOptions, Parts, PerRank, Serde, StateDict};
use candle_ddp::{Error, ProcessGroup, Result};
use candle_nn::{Init, VarMap};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// A model of one variable, a part of each rank, and numbers that may be infinite.
struct Run {
    varmap: VarMap,
    own: PerRank<VarMap>,
    best_loss: f64,
    losses: Serde<Vec<f32>>,
}

impl Parts for Run {
    fn parts(&mut self) -> Vec<(&str, &mut dyn StateDict)> {
        let Self { varmap, own, best_loss, losses } = self;
        vec![("model", varmap), ("own", own), ("best_loss", best_loss), ("losses", losses)]
    }
}

fn varmap(dtype: DType) -> VarMap {
    let varmap = VarMap::new();
    varmap.get((3, 700), "layer.weight", Init::Const(0.), dtype, &Device::Cpu).unwrap();
    varmap
}

fn var(varmap: &VarMap) -> Var {
    varmap.data().lock().unwrap()["layer.weight"].clone()
}

fn set(varmap: &VarMap, value: f64, last: f64) -> Result<()> {
    let var = var(varmap);
    let mut values = vec![value; var.elem_count()];
    values[var.elem_count() - 1] = last;
    Ok(var.set(&Tensor::from_vec(values, var.shape(), var.device())?.to_dtype(var.dtype())?)?)
}

impl Run {
    fn new(dtype: DType) -> Self {
        let (varmap, own) = (varmap(dtype), PerRank(varmap(DType::F32)));
        Self { varmap, own, best_loss: f64::INFINITY, losses: Serde(vec![f32::NAN]) }
    }

    fn value(&self) -> f64 {
        let first = var(&self.varmap).flatten_all().unwrap().get(0).unwrap();
        first.to_dtype(DType::F64).unwrap().to_scalar().unwrap()
    }
}

/// The folders of checkpoints.
fn folders(root: &Path) -> BTreeSet<String> {
    root.read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

fn named(steps: &[u64]) -> BTreeSet<String> {
    steps.iter().map(|step| format!("step-{step:08}")).collect()
}

/// Saves steps 1, 2, …, whose model is finite but for the `last` number.
fn save(pg: &ProcessGroup, root: &Path, dtype: DType, last: &[f64]) -> Result<()> {
    let (mut run, mut checkpointer) = (Run::new(dtype), going_on(pg, root)?);
    for (index, last) in last.iter().enumerate() {
        let step = index as u64 + 1;
        set(&run.varmap, step as f64, if last.is_finite() { step as f64 } else { *last })?;
        checkpointer.save(step, &mut run)?.wait()?;
    }
    checkpointer.finish()
}

#[test]
fn the_last_finite_checkpoints_stay_and_are_loaded() {
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        ranks(2, |pg| {
            save(&pg, root, dtype, &[0., 0., 0., f64::NAN, f64::INFINITY, f64::NAN])?;
            // Two finite ones, and the last.
            assert_eq!(folders(root), named(&[2, 3, 6]));
            let (mut run, mut checkpointer) = (Run::new(dtype), going_on(&pg, root)?);
            assert_eq!(checkpointer.load_latest(&mut run)?, Some(3));
            assert_eq!((run.value(), run.best_loss), (3., f64::INFINITY));
            assert!(run.losses.0[0].is_nan());
            assert_eq!(checkpointer.steps()?, [2, 3, 6]);
            assert!(checkpointer.load_step(6, &mut run)?);
            assert!(!checkpointer.load_step(5, &mut run)?);
            assert_eq!(run.value(), 6.);
            // The run continues from step 3. What diverged goes when the run is as far.
            assert_eq!(checkpointer.load_latest(&mut run)?, Some(3));
            for step in 4..=5 {
                checkpointer.save(step, &mut run)?.wait()?;
            }
            assert_eq!(checkpointer.steps()?, [4, 5, 6]);
            checkpointer.save(6, &mut run)?.wait()?;
            checkpointer.finish()?;
            let again = "step-00000006-2".to_string();
            assert_eq!(folders(root), named(&[5]).into_iter().chain([again]).collect());
            Ok(())
        });
    }
}

#[test]
fn no_nan_is_the_best() {
    let root = tempfile::tempdir().unwrap();
    ranks(2, |pg| {
        let (mut run, mut checkpointer) = (Run::new(DType::F32), going_on(&pg, root.path())?);
        checkpointer.save_best(1, &mut run)?;
        set(&run.varmap, 2., f64::NAN)?;
        let folder = checkpointer.save_best(2, &mut run)?.wait()?;
        assert!(fs::read_to_string(folder.join("checkpoint.json")).unwrap().contains("\"best\": false"));
        assert_eq!(checkpointer.load_best(&mut run)?, Some(1));
        Ok(())
    });
}

/// One rank's own part, which no other rank sees.
#[test]
fn what_one_rank_has_counts_for_all() {
    let root = tempfile::tempdir().unwrap();
    ranks(2, |pg| {
        let (mut run, mut checkpointer) = (Run::new(DType::F32), going_on(&pg, root.path())?);
        checkpointer.save(1, &mut run)?;
        if pg.rank() == 1 {
            set(&run.own.0, 1., f64::NEG_INFINITY)?;
        }
        let folder = checkpointer.save(2, &mut run)?.wait()?;
        let index = fs::read_to_string(folder.join("checkpoint.json")).unwrap();
        assert!(index.contains("an infinity in layer.weight of the part own"), "{index}");
        assert_eq!(checkpointer.load_latest(&mut run)?, Some(1));
        Ok(())
    });
}

#[test]
fn a_run_that_allows_them_keeps_them() {
    let root = tempfile::tempdir().unwrap();
    ranks(2, |pg| {
        let options = CheckpointerOptions { allow_non_finite: true, resume: true, ..Default::default() };
        let (mut run, mut checkpointer) = (Run::new(DType::F32), Checkpointer::new(&pg, root.path(), options)?);
        checkpointer.save(1, &mut run)?;
        set(&run.varmap, 2., f64::NEG_INFINITY)?;
        checkpointer.save_best(2, &mut run)?;
        assert_eq!(checkpointer.load_latest(&mut run)?, Some(2));
        assert_eq!(checkpointer.load_best(&mut run)?, Some(2));
        drop(checkpointer);
        // It is not marked, so a run that does not allow it looks at the tensors, as in an old folder.
        let mut checkpointer = going_on(&pg, root.path())?;
        assert_eq!(checkpointer.load_latest(&mut run)?, Some(1));
        assert!(checkpointer.load_best(&mut run).is_err());
        Ok(())
    });
}

#[test]
fn a_folder_without_a_finite_checkpoint_is_an_error_and_no_new_run() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    ranks(2, |pg| {
        save(&pg, root, DType::F32, &[f64::NAN, f64::NAN])?;
        assert_eq!(folders(root), named(&[2]));
        let (mut run, mut checkpointer) = (Run::new(DType::F32), going_on(&pg, root)?);
        let error = checkpointer.load_latest(&mut run).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("a NaN in layer.weight of the part model") && text.contains("load_step(2)"), "{text}");
        if pg.rank() == 0 {
            assert!(matches!(error, Error::CheckpointFile { .. }), "{error:?}");
        }
        assert_eq!(run.value(), 0., "nothing was loaded");
        assert!(checkpointer.load_step(2, &mut run)?);
        Ok(())
    });
}
