use candle_core::Tensor;
use candle_ddp::checkpoint::{Checkpointer, CheckpointerOptions, Parts, Serde, StateDict};
use candle_ddp::nn::{Linear, linear, loss, no_grad};
use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW};
use candle_ddp::{DdpOptions, DistributedDataParallel, ProcessGroup, ReduceOp, Result, Sharding};
use candle_nn::VarMap;
use std::path::Path;

/// Everything that training changes and a resumed run must restore.
struct Training {
    varmap: VarMap,
    optimizer: AdamW,
    /// Training loss and validation loss of each epoch.
    history: Serde<Vec<(f64, f64)>>,
    best: f64,
    best_epoch: u64,
}

impl Parts for Training {
    fn parts(&mut self) -> Vec<(&str, &mut dyn StateDict)> {
        let Self { varmap, optimizer, history, best, best_epoch } = self;
        vec![
            ("model", varmap),
            ("optimizer", optimizer),
            ("history", history),
            ("best", best),
            ("best_epoch", best_epoch),
        ]
    }
}

/// Trains until the loss that `validate` returns has not become better for `patience` epochs, and returns the best model. Every
/// rank calls it; all have the same numbers and decide alike. A call with the same folder continues where an earlier one has stopped.
fn train(
    pg: &ProcessGroup,
    folder: &Path,
    (epochs, patience, zero): (u64, u64, bool),
    validate: impl Fn(&DistributedDataParallel<Linear>) -> Result<f64>,
) -> Result<Training> {
    let varmap = VarMap::new();
    let sharding = if zero { Sharding::Optimizer { ranks: None } } else { Sharding::Off };
    let options = DdpOptions { init_seed: Some(42), sharding, ..Default::default() };
    let ddp = DistributedDataParallel::with_options(pg, &varmap, |vb| linear(6, 1, vb.pp("fc")), options)?;
    let params = ParamsAdamW { lr: 0.01, weight_decay: 0.0, ..Default::default() };
    let optimizer = AdamW::new(&ddp, params)?;
    let mut training = Training { varmap, optimizer, history: Serde(Vec::new()), best: f64::NAN, best_epoch: 0 };
    let mut checkpointer = Checkpointer::new(pg, folder, CheckpointerOptions { resume: true, ..Default::default() })?;
    let done = checkpointer.load_latest(&mut training)?.unwrap_or(0);
    for epoch in done..epochs {
        if epoch > training.best_epoch + patience {
            break;
        }
        let (mut sum, mut samples) = (0.0, 0.0);
        for (x, y) in training_batches(pg)? {
            let loss = loss::mse(&ddp.forward(&x)?, &y)?;
            training.optimizer.step(&ddp.backward(&loss)?)?;
            sum += f64::from(loss.to_scalar::<f32>()?) * x.dim(0)? as f64;
            samples += x.dim(0)? as f64;
        }
        // The mean over the samples of all ranks, which may differ in number.
        let [sum, samples] = pg.all_reduce_scalars([sum, samples], ReduceOp::Sum)?;
        // Rank 0 evaluates, and the others wait for its result, no longer than the group's time-out.
        let found = if pg.rank() == 0 { Some(validate(&ddp)?) } else { None };
        let validation = pg.broadcast_object(found.as_ref(), 0)?;
        training.history.0.push((sum / samples, validation));
        // The first epoch's model is the best so far, even if its loss is NaN; any number is better than that.
        if epoch == 0 || validation < training.best || (training.best.is_nan() && !validation.is_nan()) {
            (training.best, training.best_epoch) = (validation, epoch);
            checkpointer.save_best(epoch + 1, &mut training)?;
        } else {
            checkpointer.save(epoch + 1, &mut training)?;
        }
    }
    checkpointer.finish()?;
    checkpointer.load_best(("model", &mut training.varmap))?;
    Ok(training)
}

/// Forward passes send nothing, so one rank may run them alone. Under `no_grad` no activations are kept.
fn validate(ddp: &DistributedDataParallel<Linear>) -> Result<f64> {
    let x = Tensor::arange(0f32, 24.0, ddp.process_group().device())?.reshape((4, 6))?.cos()?;
    let y = (x.narrow(1, 0, 1)? * 0.8)?;
    let output = no_grad(|| ddp.forward(&x))?;
    Ok(f64::from(loss::mse(&output, &y)?.to_scalar::<f32>()?))
}

/// This rank's part of the data, which your sampler and loader give you: here, every `world_size`-th row of three batches.
fn training_batches(pg: &ProcessGroup) -> Result<Vec<(Tensor, Tensor)>> {
    let rows: Vec<u32> = (0..8).filter(|row| *row as usize % pg.world_size() == pg.rank()).collect();
    let rows = Tensor::new(rows, pg.device())?;
    let batch = |number: usize| {
        let x = Tensor::arange(0f32, 48.0, pg.device())?.reshape((8, 6))?;
        let x = (x + number as f64)?.sin()?.index_select(&rows, 0)?;
        let y = x.narrow(1, 0, 1)?;
        Ok((x, y))
    };
    (0..3).map(batch).collect()
}
