//! The message of an error alone names the culprit and the remedy.
use crate::common::{assert_error, plain, ranks};
use candle_ddp::checkpoint::{load, save};
use candle_ddp::prelude::*;
use candle_nn::linear;
use std::fs;

/// Checks the messages of both ranks of a call that fails.
fn assert_errors(call: impl Fn(&ProcessGroup) -> Result<()> + Sync, parts: &[&str]) {
    ranks(2, |pg| {
        assert_error(call(&pg), parts);
        Ok(())
    });
}

#[test]
fn ranks_gather_different_numbers_of_elements() {
    let calls = "rank 1 called all_gather(f32[4]) where rank 0 called all_gather(f32[3])";
    let gather = |pg: &ProcessGroup| {
        let own = Tensor::zeros(3 + pg.rank(), DType::F32, pg.device())?;
        pg.all_gather(&Tensor::zeros(6 + 2 * pg.rank(), DType::F32, pg.device())?, &own)
    };
    assert_errors(gather, &[calls, "must have the same number of elements on all ranks", "all_gather_object"]);
}

#[test]
fn a_call_of_rank_0_alone() {
    let broadcast = |pg: &ProcessGroup| {
        let tensor = Tensor::zeros(3, DType::F32, pg.device())?;
        if pg.rank() == 0 {
            pg.broadcast(&tensor, 0)?
        }
        pg.all_reduce(&tensor, ReduceOp::Sum)?;
        pg.barrier()
    };
    assert_errors(broadcast, &["rank 0 called broadcast(f32[3]", "inside `if rank == 0`"]);
}

#[test]
fn models_that_differ() {
    let build = |pg: &ProcessGroup| {
        DistributedDataParallel::new(pg, &VarMap::new(), |vb| linear(4, 2 + pg.rank(), vb.pp("fc"))).map(drop)
    };
    assert_errors(build, &["fc.weight f32[3, 4] on rank 1", "All ranks must have the same one"]);
}

fn model(name: &str) -> VarMap {
    plain(|vb| linear(4, 2, vb.pp(name)), DType::F32, 1).1
}

#[test]
fn a_checkpoint_of_another_model() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("other.safetensors");
    save(&model("encoder"), &file).unwrap();
    let parts = ["fc.weight", "encoder.weight", "Build the model that saved it", "LoadOptions"];
    assert_error(load(&model("fc"), &file), &parts);
}

#[test]
fn a_checkpoint_that_is_none() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("damaged.safetensors");
    fs::write(&file, b"not a checkpoint").unwrap();
    assert_error(load(&model("fc"), &file), &["damaged.safetensors", "load another file"]);
}

#[test]
fn a_checkpoint_into_a_missing_folder() {
    let folder = tempfile::tempdir().unwrap();
    let saved = save(&model("fc"), folder.path().join("missing/model.safetensors"));
    assert_error(saved, &["missing/model.safetensors", "create the folder first"]);
}

#[test]
fn a_batch_of_no_samples() {
    let load = |pg: &ProcessGroup| {
        let data = TensorDataset::new(Tensor::zeros((6, 3), DType::F32, pg.device())?)?;
        DataLoader::new(data, pg, LoaderOptions { batch_size: 0, ..Default::default() }).map(drop)
    };
    assert_errors(load, &["batch_size: it must be at least 1, not 0"]);
}
