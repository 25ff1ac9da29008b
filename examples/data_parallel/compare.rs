//! A training step with `DataParallel` and with `DistributedDataParallel`: the same model, the same batch, the same devices.
//! Steps of both alternate, so that other load on the machine affects both equally.
use super::common::median::median;
use super::mlp::Mlp;
use candle_core::{Device, Tensor};
use candle_ddp::data_parallel::{DataParallel, parallel_apply};
use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW};
use candle_ddp::{DistributedDataParallel, ProcessGroup, ReduceOp, Result};
use candle_nn::VarMap;
use candle_nn::loss::mse;
use std::time::Instant;

/// Unmeasured steps: the first ones allocate, and DDP rebuilds its buckets after the first.
const WARMUP: usize = 2;
/// The phases of a step.
const PHASES: [&str; 4] = ["forward", "loss", "backward", "optimizer"];

/// Milliseconds of the phases of a step.
type Times = [f64; PHASES.len()];

pub(crate) fn run(pg: &ProcessGroup, devices: &[Device], steps: usize, batch_size: usize, width: usize) -> Result<()> {
    let build = |vb| Mlp::new(width, vb);
    let (varmap, params) = (VarMap::new(), ParamsAdamW::default());
    let dp = DataParallel::new(devices, &devices[0], &varmap, build)?;
    let mut dp_optimizer = AdamW::new(&dp, params.clone())?;
    let ddp = DistributedDataParallel::new(pg, &VarMap::new(), build)?;
    let mut ddp_optimizer = AdamW::new(&ddp, params)?;

    let batch = Tensor::randn(0f32, 1., (batch_size, width), &devices[0])?;
    let rows = batch_size / pg.world_size();
    let part = Tensor::randn(0f32, 1., (rows, width), pg.device())?;
    let (mut dp_times, mut ddp_times) = (Vec::new(), Vec::new());
    for step in 0..WARMUP + steps {
        pg.barrier()?;
        let mut clock = Clock::start(&devices[0]);
        if pg.rank() == 0 {
            let output = dp.forward(&batch)?;
            clock.lap()?;
            let loss = dp.loss(&output, &batch, mse)?;
            clock.lap()?;
            let grads = dp.backward(&loss)?;
            clock.lap()?;
            dp_optimizer.step(&grads)?;
            clock.lap()?;
        }
        dp_times.extend((step >= WARMUP).then_some(clock.times));

        pg.barrier()?;
        let mut clock = Clock::start(pg.device());
        let output = ddp.forward(&part)?;
        clock.lap()?;
        let loss = mse(&output, &part)?;
        clock.lap()?;
        let grads = ddp.backward(&loss)?;
        clock.lap()?;
        ddp_optimizer.step(&grads)?;
        clock.lap()?;
        ddp_times.extend((step >= WARMUP).then_some(clock.times));
    }
    let copies = if pg.rank() == 0 { copying(&dp, steps)? } else { 0. };
    let (dp, ddp) = (medians(pg, dp_times)?, medians(pg, ddp_times)?);
    if pg.rank() == 0 {
        let devices = devices.len();
        println!(
            "six layers of width {width}, batch {batch_size} on {devices} devices; medians of {steps} steps, in ms"
        );
        println!("{:<10}{:>14}{:>26}", "", "DataParallel", "DistributedDataParallel");
        for (phase, name) in PHASES.iter().enumerate() {
            println!("{name:<10}{:>14.1}{:>26.1}", dp[phase], ddp[phase]);
        }
        let [dp_step, ddp_step] = [dp, ddp].map(|times| times.iter().sum::<f64>());
        println!("{:<10}{dp_step:>14.1}{ddp_step:>26.1}", "together");
        println!("\nDataParallel's forward pass begins with copying the variables to every device: {:.1} ms.", copies);
    }
    Ok(())
}

/// Returns the milliseconds that `DataParallel` needs to bring its replicas up to date, before any of them computes.
fn copying(dp: &DataParallel<Mlp>, times: usize) -> Result<f64> {
    let replicas = dp.replicas();
    let start = Instant::now();
    for _ in 0..times {
        parallel_apply(replicas, vec![(); replicas.len()], |_, ()| Ok(()))?;
    }
    Ok(start.elapsed().as_secs_f64() * 1e3 / times as f64)
}

/// Returns the median over the steps of each phase, on the slowest rank.
fn medians(pg: &ProcessGroup, steps: Vec<Times>) -> Result<Times> {
    let mut medians = Times::default();
    for (phase, found) in medians.iter_mut().enumerate() {
        *found = median(steps.iter().map(|times| times[phase]));
    }
    pg.all_reduce_scalars(medians, ReduceOp::Max)
}

struct Clock<'a> {
    device: &'a Device,
    since: Instant,
    times: Times,
    phase: usize,
}

impl<'a> Clock<'a> {
    fn start(device: &'a Device) -> Self {
        Self { device, since: Instant::now(), times: Times::default(), phase: 0 }
    }

    /// Ends the next phase, once the device has done its work.
    fn lap(&mut self) -> Result<()> {
        self.device.synchronize()?;
        self.times[self.phase] = self.since.elapsed().as_secs_f64() * 1e3;
        (self.since, self.phase) = (Instant::now(), self.phase + 1);
        Ok(())
    }
}
