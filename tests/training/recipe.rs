use candle_core::{DType, Tensor};
use candle_ddp::amp::{GradScaler, GradScalerOptions};
use candle_ddp::checkpoint::{Checkpointer, CheckpointerOptions, Parts, StateDict};
use candle_ddp::optim::{AdamW, CosineAnnealingLr, ParamsAdamW, ParamsCosineAnnealingLr};
use candle_ddp::{DdpOptions, DistributedDataParallel, ProcessGroup, Result};
use candle_nn::{Linear, VarMap, linear};
use std::path::Path;

/// Everything that training changes and a resumed run must restore.
struct Training {
    varmap: VarMap,
    ddp: DistributedDataParallel<Linear>,
    optimizer: AdamW,
    schedule: CosineAnnealingLr,
    scaler: GradScaler,
    best_loss: f64,
}

impl Training {
    /// Starts from scratch. The schedule is created before anything is loaded, because it sets the optimizer's learning rate.
    fn new(pg: &ProcessGroup) -> Result<Self> {
        let (varmap, options) = (VarMap::new(), DdpOptions::default());
        let ddp = DistributedDataParallel::with_options(pg, &varmap, |vb| linear(4, 2, vb.pp("fc")), options)?;
        let mut optimizer = AdamW::new(&ddp, ParamsAdamW { lr: 0.01, ..Default::default() })?;
        let schedule = ParamsCosineAnnealingLr { t_max: 10, ..Default::default() };
        let schedule = CosineAnnealingLr::new(&mut optimizer, schedule)?;
        let scaler = GradScaler::new(pg, &ddp, GradScalerOptions::default())?;
        Ok(Self { varmap, ddp, optimizer, schedule, scaler, best_loss: f64::INFINITY })
    }
}

impl Parts for Training {
    /// The saved parts, by the names of their files.
    fn parts(&mut self) -> Vec<(&str, &mut dyn StateDict)> {
        let Self { varmap, optimizer, schedule, scaler, best_loss, .. } = self;
        vec![
            ("model", varmap),
            ("optimizer", optimizer),
            ("schedule", schedule),
            ("scaler", scaler),
            ("best_loss", best_loss),
        ]
    }
}

fn train(pg: &ProcessGroup, folder: &Path, epochs: u64) -> Result<Training> {
    let mut training = Training::new(pg)?;
    let mut checkpointer = Checkpointer::new(pg, folder, CheckpointerOptions { resume: true, ..Default::default() })?;
    let done = checkpointer.load_latest(&mut training)?.unwrap_or(0);
    for epoch in done..epochs {
        // Your batches go here: `for batch in loader.epoch(epoch)`. This example has one.
        let x = (Tensor::arange(0f32, 32.0, pg.device())?.reshape((8, 4))? * (epoch + 1) as f64)?;
        let loss = training.ddp.forward(&x)?.sqr()?.mean_all()?;
        let mut grads = training.ddp.backward(&training.scaler.scale(&loss)?)?;
        training.scaler.step(&mut training.optimizer, &mut grads)?;
        training.scaler.update()?;
        training.schedule.step(&mut training.optimizer)?;
        training.best_loss = training.best_loss.min(f64::from(loss.to_scalar::<f32>()?));
        // Returns as soon as everything is copied. The next epoch runs while the files are written.
        checkpointer.save(epoch + 1, &mut training)?;
    }
    checkpointer.finish()?;
    Ok(training)
}
