use candle_core::{DType, Device, Tensor};
use candle_ddp::error::Context;
use candle_ddp::optim::{AdamW, CosineAnnealingLr, ParamsAdamW, ParamsCosineAnnealingLr, StateDict};
use candle_ddp::{
    DdpOptions, DistributedDataParallel, GradScaler, GradScalerOptions, ProcessGroup, Result, checkpoint,
};
use candle_nn::{Linear, VarMap, linear};
use std::collections::HashMap;
use std::path::Path;

/// Everything that training changes and a resumed run must restore.
struct Training {
    varmap: VarMap,
    ddp: DistributedDataParallel<Linear>,
    optimizer: AdamW,
    schedule: CosineAnnealingLr,
    scaler: GradScaler,
}

impl Training {
    /// Starts from scratch. The schedule is created before anything is loaded, because it sets the optimizer's learning rate.
    fn new(pg: &ProcessGroup) -> Result<Self> {
        let (varmap, options) = (VarMap::new(), DdpOptions::default());
        let ddp = DistributedDataParallel::new(pg, &varmap, DType::F32, |vb| linear(4, 2, vb.pp("fc")), options)?;
        let mut optimizer = AdamW::from_named(ddp.named_parameters(), ParamsAdamW { lr: 0.01, ..Default::default() })?;
        let schedule = ParamsCosineAnnealingLr { t_max: 10, ..Default::default() };
        let schedule = CosineAnnealingLr::new(&mut optimizer, schedule)?;
        let scaler = GradScaler::new(pg, ddp.named_parameters(), GradScalerOptions::default())?;
        Ok(Self { varmap, ddp, optimizer, schedule, scaler })
    }

    /// Saves the state after `epochs` epochs to a folder of its own. All ranks must call this.
    fn save(&self, pg: &ProcessGroup, folder: &Path, epochs: u32) -> Result<()> {
        let files = folder.join(epochs.to_string());
        if pg.rank() == 0 {
            std::fs::create_dir_all(&files).with_context(|| format!("making {}", files.display()))?;
            self.optimizer.save(files.join("optimizer.safetensors"))?;
            self.schedule.save(files.join("schedule.safetensors"))?;
            self.scaler.save(files.join("scaler.safetensors"))?;
        }
        checkpoint::save_distributed(pg, &self.varmap, files.join("model.safetensors"))?;
        if pg.rank() == 0 {
            // Written last, so that it always names a complete folder.
            let latest = HashMap::from([("epochs".to_string(), Tensor::new(&[epochs], &Device::Cpu)?)]);
            checkpoint::save_tensors(&latest, folder.join("latest.safetensors"))?;
        }
        Ok(())
    }

    /// Loads the last saved state and returns its number of completed epochs. All ranks must call this.
    fn resume(&mut self, pg: &ProcessGroup, folder: &Path) -> Result<u32> {
        let latest = folder.join("latest.safetensors");
        if !latest.exists() {
            return Ok(0);
        }
        let epochs = checkpoint::read(latest)?["epochs"].to_vec1::<u32>()?[0];
        let files = folder.join(epochs.to_string());
        checkpoint::load_distributed(pg, &self.varmap, files.join("model.safetensors"), &Default::default())?;
        self.optimizer.load(files.join("optimizer.safetensors"))?;
        self.schedule.load(files.join("schedule.safetensors"))?;
        self.scaler.load(files.join("scaler.safetensors"))?;
        Ok(epochs)
    }
}

fn train(pg: &ProcessGroup, folder: &Path, epochs: u32) -> Result<Training> {
    let mut training = Training::new(pg)?;
    for epoch in training.resume(pg, folder)?..epochs {
        // Your batches go here, after `sampler.set_epoch(epoch as usize)`. This example has one.
        let x = (Tensor::arange(0f32, 32.0, pg.device())?.reshape((8, 4))? * f64::from(epoch + 1))?;
        let loss = training.ddp.forward(&x)?.sqr()?.mean_all()?;
        let mut grads = training.ddp.backward(&training.scaler.scale(&loss)?)?;
        training.scaler.step(&mut training.optimizer, &mut grads)?;
        training.scaler.update()?;
        training.schedule.step(&mut training.optimizer)?;
        training.save(pg, folder, epoch + 1)?;
    }
    Ok(training)
}
