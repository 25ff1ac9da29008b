//! The message of an error alone names the culprit and the remedy.
use crate::common::ranks;
use candle_ddp::checkpoint::{load, save};
use candle_ddp::prelude::*;
use candle_nn::linear;
use std::fs;

/// The messages of both ranks of a call that fails.
fn messages(call: impl Fn(&ProcessGroup) -> Result<()> + Sync) -> Vec<String> {
    ranks(2, |pg| Ok(call(&pg).unwrap_err().to_string()))
}

#[track_caller]
fn assert_contains(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "{part:?} is missing: {message}");
    }
}

#[test]
fn ranks_gather_different_numbers_of_elements() {
    for message in messages(|pg| {
        let own = Tensor::zeros(3 + pg.rank(), DType::F32, pg.device())?;
        pg.all_gather(&Tensor::zeros(6 + 2 * pg.rank(), DType::F32, pg.device())?, &own)
    }) {
        let calls = "rank 1 called all_gather(f32[4]) where rank 0 called all_gather(f32[3])";
        assert_contains(&message, &[calls, "must have the same number of elements on all ranks", "all_gather_object"]);
    }
}

#[test]
fn a_call_of_rank_0_alone() {
    for message in messages(|pg| {
        let tensor = Tensor::zeros(3, DType::F32, pg.device())?;
        if pg.rank() == 0 {
            pg.broadcast(&tensor, 0)?
        }
        pg.all_reduce(&tensor, ReduceOp::Sum)?;
        pg.barrier()
    }) {
        assert_contains(&message, &["rank 0 called broadcast(f32[3]", "inside `if rank == 0`"]);
    }
}

#[test]
fn models_that_differ() {
    for message in messages(|pg| {
        DistributedDataParallel::new(pg, &VarMap::new(), |vb| linear(4, 2 + pg.rank(), vb.pp("fc"))).map(drop)
    }) {
        assert_contains(&message, &["fc.weight f32[3, 4] on rank 1", "All ranks must have the same one"]);
    }
}

fn model(name: &str) -> VarMap {
    let varmap = VarMap::new();
    linear(4, 2, VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu).pp(name)).unwrap();
    varmap
}

#[test]
fn a_checkpoint_of_another_model() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("other.safetensors");
    save(&model("encoder"), &file).unwrap();
    let message = load(&model("fc"), &file).unwrap_err().to_string();
    assert_contains(&message, &["fc.weight", "encoder.weight", "Build the model that saved it", "LoadOptions"]);
}

#[test]
fn a_checkpoint_that_is_none() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("damaged.safetensors");
    fs::write(&file, b"not a checkpoint").unwrap();
    let message = load(&model("fc"), &file).unwrap_err().to_string();
    assert_contains(&message, &["damaged.safetensors", "load another file"]);
}

#[test]
fn a_checkpoint_into_a_missing_folder() {
    let folder = tempfile::tempdir().unwrap();
    let message = save(&model("fc"), folder.path().join("missing/model.safetensors")).unwrap_err().to_string();
    assert_contains(&message, &["missing/model.safetensors", "create the folder first"]);
}

#[test]
fn a_batch_of_no_samples() {
    for message in messages(|pg| {
        let data = TensorDataset::new(Tensor::zeros((6, 3), DType::F32, pg.device())?)?;
        DataLoader::new(data, pg, LoaderOptions { batch_size: 0, ..Default::default() }).map(drop)
    }) {
        assert_contains(&message, &["batch_size: it must be at least 1, not 0"]);
    }
}
