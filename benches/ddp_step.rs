//! The cost of DistributedDataParallel: a training step with world size 1, compared with the same model in plain
//! candle.
//!
//! ```text
//! cargo bench --bench ddp_step [-- --rounds 30 --threads 1 --model MLP]
//! ```
//!
//! Both train in one process and alternate steps, so that other load on the machine affects both equally. Without
//! `--bench` (as under `cargo test`), it runs a few steps of small models as a smoke test.
use candle_core::Tensor;
use candle_ddp::{DdpOptions, DistributedDataParallel, Precision, ProcessGroup, Result, spawn};
use candle_nn::{AdamW, Module, Optimizer, Sequential, VarBuilder, VarMap};
use clap::Parser;
use median::median;
use models::{DTYPE, MODELS, Model, SMOKE_MODELS, adamw, loss};
use std::process::ExitCode;
use std::time::Instant;

#[path = "../examples/common/median.rs"]
mod median;
mod models;
mod start;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[derive(Parser)]
struct Options {
    /// The number of measured steps of each.
    #[arg(long, default_value_t = 30)]
    rounds: usize,
    /// The number of threads of candle's kernels (RAYON_NUM_THREADS).
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Measures only models whose names contain this.
    #[arg(long, default_value = "")]
    model: String,
}

/// The duration of a step's parts in milliseconds.
type Times = [f64; PARTS.len()];
const PARTS: [&str; 3] = ["forward", "backward", "optimizer"];

fn main() -> ExitCode {
    let Options { rounds, threads, model } = start::options_or(&["--rounds=2"]);
    let models = if start::is_bench() { MODELS } else { SMOKE_MODELS };
    let models = || models.iter().filter(|this| this.name.contains(&model));
    start::with_threads(threads, || spawn(1, |pg| models().try_for_each(|model| bench(&pg, model, rounds))))
}

fn bench(pg: &ProcessGroup, model: &Model, rounds: usize) -> Result<()> {
    let input = model.input()?;
    let mut plain = Plain::new(model)?;
    let mut ddp = Ddp::new(pg, model)?;
    // The first steps allocate, and DDP rebuilds its buckets after the first.
    for _ in 0..2 {
        plain.step(&input)?;
        ddp.step(&input)?;
    }
    let mut times: Vec<(Times, Times)> = Vec::with_capacity(rounds);
    for round in 0..rounds {
        times.push(if round % 2 == 0 {
            let first = plain.step(&input)?;
            (first, ddp.step(&input)?)
        } else {
            let first = ddp.step(&input)?;
            (plain.step(&input)?, first)
        });
    }
    println!("\n{}: medians of {rounds} steps\n", model.name);
    println!("| | plain, ms | DDP, ms | DDP / plain |\n|---|---|---|---|");
    for (part, name) in PARTS.iter().enumerate() {
        row(name, times.iter().map(|(plain, ddp)| (plain[part], ddp[part])));
    }
    let sum = |times: &Times, parts: usize| times[..parts].iter().sum::<f64>();
    row("forward + backward", times.iter().map(|(plain, ddp)| (sum(plain, 2), sum(ddp, 2))));
    row("**step**", times.iter().map(|(plain, ddp)| (sum(plain, 3), sum(ddp, 3))));
    Ok(())
}

/// Prints medians. The ratio is the median of the ratios of neighbouring steps.
fn row(name: &str, times: impl Iterator<Item = (f64, f64)> + Clone) {
    let plain = median(times.clone().map(|(plain, _)| plain));
    let ddp = median(times.clone().map(|(_, ddp)| ddp));
    let ratio = median(times.map(|(plain, ddp)| ddp / plain));
    println!("| {name} | {plain:.2} | {ddp:.2} | {ratio:.3} |");
}

/// The model, trained with plain candle.
struct Plain {
    module: Sequential,
    optimizer: AdamW,
}

impl Plain {
    fn new(model: &Model) -> Result<Self> {
        let varmap = VarMap::new();
        let module = (model.build)(VarBuilder::from_varmap(&varmap, DTYPE, &candle_core::Device::Cpu))?;
        Ok(Self { module, optimizer: AdamW::new(varmap.all_vars(), adamw())? })
    }

    fn step(&mut self, input: &Tensor) -> Result<Times> {
        let mut clock = Clock::start();
        let loss = loss(&self.module.forward(input)?)?;
        let forward = clock.lap();
        let grads = loss.backward()?;
        let backward = clock.lap();
        self.optimizer.step(&grads)?;
        Ok([forward, backward, clock.lap()])
    }
}

/// The model, trained with this crate.
struct Ddp {
    module: DistributedDataParallel<Sequential>,
    optimizer: AdamW,
}

impl Ddp {
    fn new(pg: &ProcessGroup, model: &Model) -> Result<Self> {
        let module = DistributedDataParallel::with_options(
            pg,
            &VarMap::new(),
            model.build,
            DdpOptions { precision: Precision::Pure(DTYPE), ..Default::default() },
        )?;
        let optimizer = AdamW::new(module.parameters(), adamw())?;
        Ok(Self { module, optimizer })
    }

    fn step(&mut self, input: &Tensor) -> Result<Times> {
        let mut clock = Clock::start();
        let loss = loss(&self.module.forward(input)?)?;
        let forward = clock.lap();
        let grads = self.module.backward(&loss)?;
        let backward = clock.lap();
        self.optimizer.step(&grads)?;
        Ok([forward, backward, clock.lap()])
    }
}

struct Clock(Instant);

impl Clock {
    fn start() -> Self {
        Self(Instant::now())
    }

    /// Returns the milliseconds since the start or the last lap.
    fn lap(&mut self) -> f64 {
        let now = Instant::now();
        let elapsed = now - std::mem::replace(&mut self.0, now);
        elapsed.as_secs_f64() * 1e3
    }
}
