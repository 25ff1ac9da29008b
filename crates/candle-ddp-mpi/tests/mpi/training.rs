//! Training over MPI.
use crate::digits::{Options, train};
use crate::launch;
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Module, Tensor};
use candle_ddp::checkpoint::{Checkpointer, CheckpointerOptions};
use candle_ddp::{Backward, DistributedDataParallel, ProcessGroup, Result, SpawnOptions, backward_with};
use candle_ddp_mpi::{MpiOptions, init_process_group, run};
use candle_nn::{Linear, VarBuilder, VarMap, linear};
use clap::Parser;

#[test]
fn digits_are_learned() {
    launch::ranks("training::digits_are_learned", 2, || {
        run(|pg| train(pg, &Options::parse_from(["digits", "--epochs", "12", "--require-accuracy", "0.96"])))
    });
}

/// The examples of one step: half of them for each rank.
fn batch(step: usize) -> Result<Tensor> {
    let values = (0..16).map(|index| ((7 * index + 5 * step) % 11) as f32 / 11.0 - 0.4).collect();
    Ok(Tensor::from_vec(values, (4, 4), &Device::Cpu)?)
}

fn build(vb: VarBuilder) -> candle_core::Result<Linear> {
    linear(4, 3, vb.pp("fc"))
}

fn weights(varmap: &VarMap) -> Result<Vec<f32>> {
    let data = varmap.data().lock().unwrap();
    Ok(data["fc.weight"].flatten_all()?.to_vec1()?)
}

fn set_weights(varmap: &VarMap) -> Result<()> {
    for var in varmap.data().lock().unwrap().values() {
        let count = var.elem_count();
        let values = Tensor::arange(0, count as u32, &Device::Cpu)?.to_dtype(DType::F32)?;
        var.set(&(values / count as f64)?.reshape(var.shape())?)?;
    }
    Ok(())
}

/// The weights after three steps with all examples in one process.
fn alone() -> Result<Vec<f32>> {
    let varmap = VarMap::new();
    let net = build(VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu))?;
    set_weights(&varmap)?;
    for step in 0..3 {
        let grads = net.forward(&batch(step)?)?.sqr()?.mean_all()?.backward()?;
        for var in varmap.all_vars() {
            var.set(&(var.as_tensor() - (grads.get(&var).unwrap() * 0.1)?)?)?;
        }
    }
    weights(&varmap)
}

fn together(pg: &ProcessGroup) -> Result<Vec<f32>> {
    let varmap = VarMap::new();
    let ddp = DistributedDataParallel::new(pg, &varmap, build)?;
    set_weights(&varmap)?;
    for step in 0..3 {
        let x = batch(step)?.narrow(0, 2 * pg.rank(), 2)?;
        let grads = ddp.backward(&ddp.forward(&x)?.sqr()?.mean_all()?)?;
        for (_, var) in ddp.named_parameters() {
            var.set(&(var.as_tensor() - (grads.get(&var).unwrap() * 0.1)?)?)?;
        }
    }
    weights(&varmap)
}

#[test]
fn ddp_trains_as_one_process_does() {
    launch::ranks("training::ddp_trains_as_one_process_does", 2, || {
        let trained = run(together)?;
        for (trained, expected) in trained.iter().zip(alone()?) {
            assert!((trained - expected).abs() < 1e-6, "{trained} where {expected} is expected");
        }
        Ok(())
    });
}

const VIRTUAL: usize = 4;

/// The bits of the weights after three steps of four micro-batches.
fn virtual_ranks(pg: &ProcessGroup) -> Result<Vec<u32>> {
    let varmap = VarMap::new();
    let ddp = DistributedDataParallel::new(pg, &varmap, build)?;
    set_weights(&varmap)?;
    for step in 0..3 {
        let mut grads = GradStore::default();
        for number in ddp.micro_batches().unwrap() {
            let x = batch(step)?.narrow(0, number, 1)?;
            let options = Backward { micro_batch: Some(number), ..Default::default() };
            grads = backward_with(&ddp.forward(&x)?.sin()?.mean_all()?, &[&ddp], options)?;
        }
        for (_, var) in ddp.named_parameters() {
            var.set(&(var.as_tensor() - (grads.get(&var).unwrap() * 0.1)?)?)?;
        }
    }
    Ok(weights(&varmap)?.into_iter().map(f32::to_bits).collect())
}

/// Of three ranks, one computes two micro-batches and the others one each.
#[test]
fn virtual_ranks_give_the_bits_of_one_process() {
    for count in [2, 3, 4] {
        launch::ranks("training::virtual_ranks_give_the_bits_of_one_process", count, || {
            let alone = SpawnOptions { virtual_ranks: Some(VIRTUAL), ..Default::default() };
            let alone = candle_ddp::spawn_with(alone, |pg| virtual_ranks(&pg))?.remove(0);
            let pg = init_process_group(MpiOptions { virtual_ranks: Some(VIRTUAL), ..Default::default() })?;
            assert_eq!(pg.abort_on_error(|| virtual_ranks(&pg))?, alone);
            Ok(())
        });
    }
}

/// The background write has its own group over MPI.
#[test]
fn a_checkpoint_is_written_in_the_background_and_loaded() {
    launch::ranks("training::a_checkpoint_is_written_in_the_background_and_loaded", 2, || {
        run(|pg| {
            let number = std::process::id();
            let number = pg.broadcast_object((pg.rank() == 0).then_some(&number), 0)?;
            let folder = std::env::temp_dir().join(format!("candle-ddp-mpi-{number}"));
            let mut varmap = VarMap::new();
            let net = DistributedDataParallel::new(pg, &varmap, build)?;
            set_weights(&varmap)?;
            let saved = weights(&varmap)?;
            let mut checkpointer =
                Checkpointer::new(pg, &folder, CheckpointerOptions { every: 1, ..Default::default() })?;
            checkpointer.save(1, ("model", &mut varmap))?;
            checkpointer.finish()?;
            for (_, var) in net.named_parameters() {
                var.set(&var.zeros_like()?)?;
            }
            assert_eq!(checkpointer.load_latest(("model", &mut varmap))?, Some(1));
            assert_eq!(weights(&varmap)?, saved);
            pg.barrier()?;
            if pg.rank() == 0 {
                std::fs::remove_dir_all(&folder).unwrap();
            }
            Ok::<_, candle_ddp::Error>(())
        })
    });
}
