//! The cost of DistributedDataParallel on a GPU: a training step with world size 1, compared with the same model in
//! plain candle.
//!
//! ```text
//! cargo bench --features nccl --bench ddp_step_gpu [-- --rounds 20 --model transformer]
//! ```
//!
//! Both train in one process and alternate batches of a few steps; the device is waited for at the end of each batch
//! only. With a single rank, NCCL has nothing to do for an in-place all-reduce, so this measures everything else.
//! Without a GPU, the bench says so and exits.
//!
//! For a timeline of a step on several GPUs, with the all-reduces next to the backward pass, use the example `step`
//! with `CANDLE_DDP_TRACE`, or run it under NVIDIA's `nsys profile --trace=cuda`.
use candle_core::{Device, Tensor};
use candle_ddp::backend::nccl;
use candle_ddp::{DdpOptions, DistributedDataParallel, Precision, ProcessGroup, Result};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarBuilder, VarMap};
use clap::Parser;
use median::median;
use models::{MODELS, Model, Net, loss};
use std::process::{Command, ExitCode};
use std::time::Instant;

#[path = "../gpu/mod.rs"]
mod gpu;
#[path = "../../examples/common/median.rs"]
mod median;
mod models;

#[derive(Parser)]
struct Options {
    /// The number of measurements of each.
    #[arg(long, default_value_t = 20)]
    rounds: usize,
    /// The number of steps in a measurement.
    #[arg(long, default_value_t = 5)]
    steps: usize,
    /// Measures only models whose names contain this.
    #[arg(long, default_value = "")]
    model: String,
    /// Divides the batch size, for smaller cards.
    #[arg(long, default_value_t = 1)]
    divide_batch: usize,
}

fn main() -> ExitCode {
    gpu::main(Options { rounds: 1, steps: 1, model: String::new(), divide_batch: 16 }, bench_all)
}

fn bench_all(options: &Options) -> Result<()> {
    let pg = gpu::world_of_one()?;
    let query = ["--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"];
    let card = Command::new("nvidia-smi").args(query).output();
    let card = card.map_or_else(|_| String::new(), |output| String::from_utf8_lossy(&output.stdout).trim().to_string());
    println!("{card}, NCCL {}, {} × {} steps\n", nccl::version()?, options.rounds, options.steps);
    println!("| model | batch | plain, ms | DDP, ms | DDP / plain |\n|---|---|---|---|---|");
    for model in MODELS.iter().filter(|model| model.name.contains(&options.model)) {
        bench(&pg, model, options)?;
    }
    Ok(())
}

fn bench(pg: &ProcessGroup, model: &Model, options: &Options) -> Result<()> {
    let batch = (model.batch / options.divide_batch).max(1);
    let input = model.input(batch, pg.device())?;
    let mut plain = Plain::new(model, pg.device())?;
    let mut ddp = Ddp::new(pg, model)?;
    // The first steps load kernels and allocate, and DDP rebuilds its buckets after the first.
    for _ in 0..3 {
        plain.step(&input)?;
        ddp.step(&input)?;
    }
    let time = |step: &mut dyn FnMut() -> Result<()>| -> Result<f64> {
        pg.device().synchronize()?;
        let start = Instant::now();
        for _ in 0..options.steps {
            step()?;
        }
        pg.device().synchronize()?;
        Ok(start.elapsed().as_secs_f64() * 1e3 / options.steps as f64)
    };
    let mut times = Vec::with_capacity(options.rounds);
    for round in 0..options.rounds {
        times.push(if round % 2 == 0 {
            let first = time(&mut || plain.step(&input))?;
            (first, time(&mut || ddp.step(&input))?)
        } else {
            let first = time(&mut || ddp.step(&input))?;
            (time(&mut || plain.step(&input))?, first)
        });
    }
    let (plain, ddp) = (median(times.iter().map(|times| times.0)), median(times.iter().map(|times| times.1)));
    // The ratios of neighbouring measurements.
    let ratio = median(times.iter().map(|(plain, ddp)| ddp / plain));
    println!("| {} | {batch} | {plain:.2} | {ddp:.2} | {ratio:.3} |", model.name);
    Ok(())
}

fn adamw() -> ParamsAdamW {
    // A learning rate at which nothing overflows, however many steps are measured.
    ParamsAdamW { lr: 1e-5, ..Default::default() }
}

/// The model, trained with plain candle.
struct Plain {
    net: Net,
    optimizer: AdamW,
}

impl Plain {
    fn new(model: &Model, device: &Device) -> Result<Self> {
        let varmap = VarMap::new();
        let net = (model.build)(VarBuilder::from_varmap(&varmap, model.dtype, device))?;
        Ok(Self { net, optimizer: AdamW::new(varmap.all_vars(), adamw())? })
    }

    fn step(&mut self, input: &Tensor) -> Result<()> {
        let loss = loss(&(self.net)(input)?)?;
        Ok(self.optimizer.step(&loss.backward()?)?)
    }
}

/// The model, trained with this crate.
struct Ddp {
    net: DistributedDataParallel<Net>,
    optimizer: AdamW,
}

impl Ddp {
    fn new(pg: &ProcessGroup, model: &Model) -> Result<Self> {
        let net = DistributedDataParallel::with_options(
            pg,
            &VarMap::new(),
            model.build,
            DdpOptions { precision: Precision::Pure(model.dtype), ..Default::default() },
        )?;
        let optimizer = AdamW::new(net.parameters(), adamw())?;
        Ok(Self { net, optimizer })
    }

    fn step(&mut self, input: &Tensor) -> Result<()> {
        let loss = loss(&self.net.call(|net| net(input))?)?;
        Ok(self.optimizer.step(&self.net.backward(&loss)?)?)
    }
}
